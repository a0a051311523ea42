# llm, a command line for models: a chat by a model of its extra-openai-models.yaml, and its log.
set -eu
url=$1 model=$2
export LLM_USER_PATH=$(mktemp -d)
trap 'rm -r "$LLM_USER_PATH"' EXIT
printf -- '- model_id: own\n  model_name: %s\n  api_base: %s/v1\n  supports_schema: true\n' \
    "$model" "$url" > "$LLM_USER_PATH/extra-openai-models.yaml"
export OPENAI_API_KEY=none
test -n "$(llm -m own -o max_tokens 8 'Hello')"
llm -m own -o max_tokens 256 --no-stream --schema '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"], "additionalProperties": false}' 'A number' |
    python3 -c 'import json, sys; assert isinstance(json.load(sys.stdin)["n"], int)'
test "$(llm logs count 2>/dev/null || llm logs list --json -n 0 | python3 -c 'import json, sys; print(len(json.load(sys.stdin)))')" -ge 2

# lm-evaluation-harness: log-likelihoods of texts, and answers to chats, of a task of three documents.
set -eu
url=$1 model=$2
here=$(mktemp -d)
trap 'rm -r "$here"' EXIT
printf '{"q": "One and one is", "a": " two"}\n{"q": "Red and blue is", "a": " violet"}\n{"q": "Up and", "a": " down"}\n' > "$here/data.jsonl"
cat > "$here/own.yaml" <<END
task: own
dataset_path: json
dataset_kwargs: {data_files: {test: $here/data.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: ["{{a}}", " nothing"]
doc_to_target: 0
metric_list: [{metric: acc}]
END
cat > "$here/said.yaml" <<END
task: said
dataset_path: json
dataset_kwargs: {data_files: {test: $here/data.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {max_gen_toks: 4, until: ["."]}
metric_list: [{metric: exact_match}]
END
export HF_HUB_OFFLINE=1 HF_DATASETS_CACHE=$here/cache OPENAI_API_KEY=none
lm_eval run --model local-completions --tasks own --include_path "$here" --model_args \
    "model=$model,base_url=$url/v1/completions,tokenizer_backend=remote,tokenized_requests=True,max_length=256" \
    --output_path "$here/out" > "$here/log" 2>&1 || { cat "$here/log" >&2; exit 1; }
lm_eval run --model local-chat-completions --apply_chat_template --tasks said --include_path "$here" --model_args \
    "model=$model,base_url=$url/v1/chat/completions,tokenizer_backend=None,max_length=256" \
    --output_path "$here/out" > "$here/log" 2>&1 || { cat "$here/log" >&2; exit 1; }
test "$(find "$here/out" -name 'results*.json' | wc -l)" = 2

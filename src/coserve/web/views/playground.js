// Playground: the base and adapters or checkpoints side by side, each with a history of its own.

import { Button, Dialog, Empty, Field, Name, Notice, Panel, digits, duration, html, useEffect, useJson, useMemo, useRef, useState } from "../ui.js";
import { get, stream } from "../api.js";
import { Copyable, useDraft } from "./common.js";
import { JsonField } from "./new-job.js";

const MOST = 4; // the base and three others
const JOBS_LOOKED_AT = 5; // the newest, whose checkpoints are offered
const NEW = { models: [], system: "", text: "", turns: [], settings: { temperature: 0.7, max_tokens: 256 }, tools: undefined, schema: undefined, logprobs: false };

export default function Playground({ rest }) {
  const [draft, setDraft] = useDraft("playground", NEW);
  const offered = useModels();
  const asked = rest[0];
  useEffect(() => { // a link from a job or an adapter: beside the base, the others go
    if (!asked || !offered.base) return;
    setDraft((old) => (old.models.includes(asked) ? {} : { models: [...(old.turns.length ? old.models.slice(0, MOST - 1) : [offered.base]), asked].filter((one, at, all) => all.indexOf(one) === at) }));
  }, [asked, offered.base]);
  useEffect(() => { if (offered.base) setDraft((old) => (old.models.length ? {} : { models: [offered.base] })); }, [offered.base]);
  const { answer, stop, busy } = useAnswers(draft, setDraft);
  const [copies, setCopies] = useState(null);
  const isReady = draft.models.length > 0 && (offered.base !== null || !asked);
  const [waits, setWaits] = useState(false); // a message that is sent once it is known to which models
  useEffect(() => { if (isReady && waits) { setWaits(false); send(); } }, [isReady, waits]);
  const send = () => {
    const text = draft.text.trim();
    if (!text || busy) return;
    if (!isReady) return setWaits(true);
    const turns = [...draft.turns, { user: text, answers: {} }];
    setDraft({ text: "", turns });
    answer(turns);
  };
  const again = () => {
    const turns = [...draft.turns.slice(0, -1), { ...draft.turns.at(-1), answers: {} }];
    setDraft({ turns });
    answer(turns);
  };
  const give = (model, results) => { // of the tools that it called
    const last = draft.turns.at(-1), told = changed(last.answers[model], { results, then: {} });
    answer([...draft.turns.slice(0, -1), { ...last, answers: { ...last.answers, [model]: told } }], [model]);
  };
  const key = (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } };
  return html`<${Notice} error=${offered.error} /><${Models} draft=${draft} setDraft=${setDraft} offered=${offered} disabled=${busy} />
    <div class="columns">${draft.models.map((model, at) => html`<${Column} key=${model} model=${model} color=${at + 1} turns=${draft.turns} busy=${busy} onResults=${busy ? null : (results) => give(model, results)} onCopy=${() => setCopies(model)}
      onRemove=${draft.models.length > 1 && !busy ? () => setDraft((old) => ({ models: old.models.filter((one) => one !== model) })) : null} />`)}</div>
    <${Panel}><form class="stack" onSubmit=${(event) => { event.preventDefault(); send(); }}>
      <textarea aria-label="Message" rows="3" placeholder="A message${draft.models.length > 1 ? " to all of them" : ""}; Enter sends it" value=${draft.text} onInput=${({ target }) => setDraft({ text: target.value })} onKeyDown=${key}></textarea>
      <div class="row">${busy ? html`<${Button} onClick=${stop}>Stop<//>` : html`<${Button} type="submit" disabled=${!draft.text.trim() || waits}>Send<//>`}
        <${Button} quiet disabled=${busy || !draft.turns.length} onClick=${again}>Answer again<//>
        <${Button} quiet disabled=${busy || !draft.turns.length} onClick=${() => setDraft({ turns: [] })}>New chat<//>
        <label class="check"><input type="checkbox" checked=${draft.logprobs} onChange=${({ target }) => setDraft({ logprobs: target.checked })} /> Log-probabilities</label>
        ${!isReady && html`<small aria-busy="true">${waits ? "It is sent as soon as the models are known …" : "Looking for models …"}</small>`}</div>
      <${Settings} draft=${draft} setDraft=${setDraft} /></form><//>
    ${copies && html`<${Copies} model=${copies} draft=${draft} onClose=${() => setCopies(null)} />`}`;
}

// Names that can be asked: bases, adapters, and checkpoints of the newest jobs.
function useModels() {
  const { data, error } = useJson("/v1/models", 10);
  const [checkpoints, setCheckpoints] = useState([]);
  useEffect(() => {
    let gone = false;
    const load = async () => {
      try {
        const jobs = (await get(`/v1/fine_tuning/jobs?limit=${JOBS_LOOKED_AT}`)).data;
        const lists = await Promise.all(jobs.map((job) => get(`/v1/fine_tuning/jobs/${job.id}/checkpoints?limit=10`)));
        if (!gone) setCheckpoints(lists.flatMap((list) => list.data.map((one) => one.fine_tuned_model_checkpoint)));
      } catch { /* they can be typed */ }
    };
    load();
    const timer = setInterval(() => { if (!document.hidden) load(); }, 10000);
    return () => { gone = true; clearInterval(timer); };
  }, []);
  const models = data?.data ?? [];
  return { error, base: models.find((one) => one.parent === null)?.id ?? null, names: [...models.map((one) => one.id), ...checkpoints] };
}

function Models({ draft, setDraft, offered, disabled }) {
  const [text, setText] = useState("");
  const left = offered.names.filter((name) => !draft.models.includes(name));
  const add = (name) => {
    if (!name || draft.models.includes(name) || draft.models.length >= MOST) return;
    setDraft((old) => ({ models: [...old.models, name] }));
    setText("");
  };
  if (draft.models.length >= MOST) return null;
  return html`<form class="row add" onSubmit=${(event) => { event.preventDefault(); add(text.trim()); }}>
    <input aria-label="Model to add" list="models" placeholder="Add an adapter or a checkpoint" value=${text} disabled=${disabled} spellcheck="false" onInput=${({ target }) => { setText(target.value); if (left.includes(target.value)) add(target.value); }} />
    <datalist id="models">${left.slice(0, 200).map((name) => html`<option value=${name} />`)}</datalist><${Button} quiet type="submit" disabled=${disabled || !text.trim()}>Add<//></form>`;
}

// The body of a request to one model: its own answers are its history.
function bodyOf(draft, model, turns) {
  const messages = draft.system.trim() ? [{ role: "system", content: draft.system }] : [];
  turns.forEach((turn, at) => messages.push({ role: "user", content: turn.user }, ...historyOf(turn.answers[model], at < turns.length - 1)));
  const body = { model, messages, ...draft.settings };
  if (draft.tools?.length) body.tools = draft.tools;
  if (draft.schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: draft.schema } };
  return body;
}

// The messages of an answer, of the results of its tools, and of the answer after those; unless `whole` without the last.
function historyOf(told, whole) {
  const { text, calls, results, then } = told ?? {};
  if (!results) return whole && text ? [{ role: "assistant", content: text }] : [];
  const tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return [{ role: "assistant", content: text || null, tool_calls }, ...results.map((content, at) => ({ role: "tool", tool_call_id: calls[at].id, content })), ...historyOf(then, whole)];
}

// An answer is followed by another one where its tools' results were sent.
const newest = (told) => (told?.then ? newest(told.then) : told);
const changed = (told, fields) => (told?.then ? { ...told, then: changed(told.then, fields) } : { ...told, ...fields });

// Asks all models at once. What has come of an answer is drawn once a frame.
function useAnswers(draft, setDraft) {
  const [busy, setBusy] = useState(false);
  const stopping = useRef(null);
  useEffect(() => () => stopping.current?.abort(), []);
  const answer = async (turns, models = draft.models) => {
    const stop = (stopping.current = new AbortController());
    setBusy(true);
    const told = { ...turns.at(-1).answers }; // by model
    let frame = 0;
    const draw = () => {
      frame = 0;
      setDraft((old) => ({ turns: [...old.turns.slice(0, -1), { ...turns.at(-1), answers: { ...told } }] }));
    };
    const tell = (model, fields) => { told[model] = changed(told[model], fields); frame ||= requestAnimationFrame(draw); };
    await Promise.all(models.map(async (model) => {
      const begun = performance.now();
      tell(model, { text: "", state: "waits" });
      const body = { ...bodyOf(draft, model, turns), stream: true, stream_options: { include_usage: true }, ...(draft.logprobs ? { logprobs: true, top_logprobs: 5 } : {}) };
      try {
        const onHeaders = (headers) => tell(model, { version: decodeURIComponent(headers.get("x-coserve-version") ?? "") });
        for await (const chunk of stream("/v1/chat/completions", { method: "POST", json: body, signal: stop.signal, onHeaders })) {
          const now = newest(told[model]), choice = chunk.choices[0];
          if (chunk.usage) tell(model, { tokens: chunk.usage.completion_tokens });
          if (!choice) continue;
          const { delta, logprobs } = choice;
          tell(model, {
            state: "answers", first: now.first ?? (delta.content ? performance.now() - begun : undefined), finish: choice.finish_reason ?? now.finish,
            text: now.text + (delta.content ?? ""), thought: (now.thought ?? "") + (delta.reasoning_content ?? ""), calls: joined(now.calls, delta.tool_calls),
            scores: logprobs?.content ? [...(now.scores ?? []), ...logprobs.content] : now.scores,
          });
        }
        tell(model, { state: "done", took: performance.now() - begun });
      } catch (error) {
        tell(model, error.name === "AbortError" ? { state: "stopped", took: performance.now() - begun } : { state: "failed", error: error.message });
      }
    }));
    cancelAnimationFrame(frame);
    draw();
    setBusy(false);
  };
  return { answer, busy, stop: () => stopping.current?.abort() };
}

function joined(calls = [], deltas = []) {
  const found = calls.map((one) => ({ ...one }));
  for (const { index, id, function: piece } of deltas) {
    const one = (found[index] ??= { id, name: "", arguments: "" });
    one.name += piece.name ?? "";
    one.arguments += piece.arguments ?? "";
  }
  return found;
}

function Column({ model, color, turns, busy, onRemove, onCopy, onResults }) {
  const end = useRef(null);
  const length = newest(turns.at(-1)?.answers[model])?.text?.length;
  useEffect(() => { const { parentNode } = end.current; parentNode.scrollTop = parentNode.scrollHeight; }, [turns.length, length]);
  return html`<section class="panel column" aria-label="Chat with ${model}"><header><h2><i class="dot color-${color}"></i><${Name} text=${model} most=${60} /></h2>
      <span class="row"><${Button} quiet onClick=${onCopy}>Copy as<//>${onRemove && html`<button type="button" class="quiet" aria-label="Remove ${model}" onClick=${onRemove}>✕</button>`}</span></header>
    <div class="chat" tabindex="0" role="log" aria-label="Answers of ${model}">${turns.length === 0 && html`<${Empty}>Nothing has been asked yet: write a message below.<//>`}
      ${turns.map((turn, at) => html`<div class="turn" key=${at}><p class="user"><bdi>${turn.user}</bdi></p><${Answer} told=${turn.answers[model]} busy=${busy} onResults=${at === turns.length - 1 ? onResults : null} /></div>`)}<span ref=${end}></span></div></section>`;
}

function Answer({ told, busy, onResults }) {
  if (!told) return null;
  if (told.error) return html`<${Notice}>${told.error}<//>`;
  const waits = busy && told.state === "waits", isCut = !busy && ["waits", "answers"].includes(told.state); // by a page that was left
  const facts = [told.version && html`version <code>${told.version}</code>`, told.tokens != null && `${told.tokens} tokens`, told.first && `first after ${duration(told.first / 1000)}`,
    told.took && told.tokens > 1 && `${digits(told.tokens / (told.took / 1000))} tok/s`, told.finish === "length" && "cut at the most tokens", (told.state === "stopped" || isCut) && "stopped"].filter(Boolean);
  return html`<div class="answer" aria-busy=${waits}>${told.thought && html`<details><summary>Reasoning</summary><p>${told.thought}</p></details>`}
    ${told.scores ? html`<${Scored} scores=${told.scores} />` : html`<p><bdi>${told.text}</bdi>${waits && html`<span class="cursor">▍</span>`}</p>`}
    ${told.calls?.map((call, at) => html`<pre>${call.name}(${call.arguments})${told.results ? `\n→ ${told.results[at]}` : ""}</pre>`)}<small>${facts.map((one, at) => html`${at ? " · " : ""}${one}`)}</small>
    ${told.calls?.length && !told.results && onResults ? html`<${Results} calls=${told.calls} onResults=${onResults} />` : ""}</div>
    ${told.then && html`<${Answer} told=${told.then} busy=${busy} onResults=${onResults} />`}`;
}

// What the tools give back, which the person says in their place.
function Results({ calls, onResults }) {
  const send = (event) => { event.preventDefault(); onResults(new FormData(event.target).getAll("result")); };
  return html`<form class="stack" onSubmit=${send}>${calls.map((call) => html`<${Field} label="Result of ${call.name}" hint=""><input name="result" spellcheck="false" /><//>`)}<div><${Button} type="submit">Send results<//></div></form>`;
}

// Tokens, the darker the less likely they were; pointing at one tells its log-probability and what else was likely.
function Scored({ scores }) {
  const [at, setAt] = useState(null);
  const one = at === null ? null : scores[at];
  const likely = (logprob) => `${(100 * Math.exp(logprob)).toPrecision(3)} %`;
  const tell = (event) => { const found = event.target.dataset?.at; setAt(found === undefined ? null : Number(found)); };
  return html`<p class="scored" onPointerOver=${tell} onPointerLeave=${() => setAt(null)} onFocusIn=${tell}>${scores.map((score, place) => html`<span key=${place} data-at=${place} class="score-${Math.min(4, Math.floor(-score.logprob / 0.7))}">${score.token}</span>`)}</p>
    <p class="likely mono" role="status">${one ? html`<strong>${JSON.stringify(one.token)}</strong> ${one.logprob.toFixed(3)} (${likely(one.logprob)})${one.top_logprobs?.filter((other) => other.token !== one.token).slice(0, 4).map((other) => html` · ${JSON.stringify(other.token)} ${likely(other.logprob)}`)}` : html`<small>Point at a token.</small>`}</p>`;
}

function Settings({ draft, setDraft }) {
  const number = (label, name, hint, step, most) => html`<${Field} label=${label} hint=${hint}><input type="number" min="0" max=${most} step=${step} value=${draft.settings[name] ?? ""} onInput=${({ target }) => { if (target.validity.badInput) return; setDraft((old) => { const { [name]: _, ...others } = old.settings; return { settings: target.value === "" ? others : { ...others, [name]: Number(target.value) } }; }); }} /><//>`;
  return html`<details><summary>Settings, system prompt, tools</summary>
    <${Field} label="System prompt" hint=""><textarea rows="2" value=${draft.system} onInput=${({ target }) => setDraft({ system: target.value })}></textarea><//>
    <div class="fields">${number("Temperature", "temperature", "0 is greedy", 0.1, 2)}${number("Top p", "top_p", "1 unless given", 0.05, 1)}${number("Top k", "top_k", "", 1)}${number("Most tokens", "max_tokens", "", 1)}${number("Seed", "seed", "drawn unless given", 1)}${number("Presence penalty", "presence_penalty", "", 0.1, 2)}</div>
    <div class="fields"><${JsonField} label="Tools (JSON)" value=${draft.tools} onValue=${(tools) => setDraft({ tools })} hint='A list, as [{"type": "function", "function": {"name": …}}]' />
    <${JsonField} label="JSON schema of the answer" value=${draft.schema} onValue=${(schema) => setDraft({ schema })} hint='As {"type": "object", "properties": …}' /></div></details>`;
}

// The next request to a model as a program.

const KINDS = { curl: asCurl, OpenAI: asOpenAI, Anthropic: asAnthropic, Tinker: asTinker };

function Copies({ model, draft, onClose }) {
  const [kind, setKind] = useState("curl");
  const turns = [...draft.turns, ...(draft.text.trim() || !draft.turns.length ? [{ user: draft.text.trim() || "Hello!", answers: {} }] : [])];
  const text = useMemo(() => KINDS[kind](bodyOf(draft, model, turns)), [kind, model, draft]);
  return html`<${Dialog} title="Copy as" onClose=${onClose}><div class="stack"><div class="row" role="group" aria-label="Kind of program">${Object.keys(KINDS).map((one) => html`<button type="button" class=${one === kind ? "" : "quiet"} aria-pressed=${one === kind} onClick=${() => setKind(one)}>${one}</button>`)}</div><${Copyable} label="Program" text=${text} /></div><//>`;
}

// A value in Python's words.
function python(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
  const inner = `${indent}    `;
  const parts = Array.isArray(value) ? value.map((one) => python(one, inner)) : Object.entries(value).filter(([, one]) => one !== undefined).map(([name, one]) => `${JSON.stringify(name)}: ${python(one, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return parts.length ? `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}` : open + close;
}

function asCurl(body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${location.origin}/v1/chat/completions \\\n  -H "Authorization: Bearer $COSERVE_API_KEY" \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'`;
}

function asOpenAI({ top_k, ...body }) {
  const given = Object.entries(body).map(([name, value]) => `    ${name}=${python(value, "    ")},\n`).join("");
  const extra = top_k === undefined ? "" : `    extra_body={"top_k": ${top_k}},\n`;
  return `import os\nimport openai\n\nclient = openai.OpenAI(base_url="${location.origin}/v1", api_key=os.environ.get("COSERVE_API_KEY", "none"))\nanswer = client.chat.completions.create(\n${given}${extra})\nprint(answer.choices[0].message.content)`;
}

// A message in Anthropic's words: calls and results of tools are blocks.
function anthropicOf(one) {
  if (one.role === "tool") return { role: "user", content: [{ type: "tool_result", tool_use_id: one.tool_call_id, content: one.content }] };
  if (!one.tool_calls) return one;
  const parsed = (text) => { try { return JSON.parse(text); } catch { return {}; } }; // one that was cut
  return { role: "assistant", content: [...(one.content ? [{ type: "text", text: one.content }] : []), ...one.tool_calls.map(({ id, function: { name, arguments: given } }) => ({ type: "tool_use", id, name, input: parsed(given) }))] };
}

function asAnthropic({ model, messages, tools, response_format: form, temperature, top_p, top_k, max_tokens = 256 }) {
  const system = messages.find((one) => one.role === "system")?.content;
  const given = { model, max_tokens, system, messages: messages.filter((one) => one.role !== "system").map(anthropicOf),
    tools: tools?.map(({ function: one }) => ({ name: one.name, description: one.description ?? "", input_schema: one.parameters ?? { type: "object" } })),
    extra_body: { temperature: temperature === undefined ? undefined : Math.min(1, temperature), top_p, top_k, output_config: form && { format: { type: "json_schema", schema: form.json_schema.schema } } } }; // newer clients have no parameters for these
  const lines = Object.entries(given).filter(([, value]) => value !== undefined).map(([name, value]) => `    ${name}=${python(value, "    ")},\n`).join("");
  return `import os\nimport anthropic\n\nclient = anthropic.Anthropic(base_url="${location.origin}", api_key=os.environ.get("COSERVE_API_KEY", "none"))\nanswer = client.messages.create(\n${lines})\nprint(answer.content[0].text)`;
}

function asTinker({ model, messages, temperature = 1, top_p, top_k, max_tokens = 256, seed }) {
  const given = Object.entries({ max_tokens, temperature, top_p, top_k, seed }).filter(([, value]) => value !== undefined).map(([name, value]) => `${name}=${value}`).join(", ");
  return `import os\n\nos.environ["TINKER_BASE_URL"] = url = "${location.origin}"\nkey = os.environ.get("COSERVE_API_KEY", "none")\nos.environ["TINKER_API_KEY"] = "tml-" + key\nimport httpx\nimport tinker\nfrom tinker import types\n\n\ndef ask(path, **body):  # the server has the tokenizer and the chat's template\n    body["model"] = ${python(model)}\n    answer = httpx.post(url + path, json=body, headers={"Authorization": "Bearer " + key})\n    return answer.raise_for_status().json()\n\n\nservice = tinker.ServiceClient()\nsampler = service.create_sampling_client(${model.startsWith("tinker://") ? "model_path" : "base_model"}=${python(model)})\nmessages = ${python(messages)}\nprompt = types.ModelInput.from_ints(ask("/tokenize", messages=messages)["tokens"])\nanswer = sampler.sample(prompt, num_samples=1, sampling_params=types.SamplingParams(${given})).result()\nprint(ask("/detokenize", tokens=answer.sequences[0].tokens)["prompt"])`;
}

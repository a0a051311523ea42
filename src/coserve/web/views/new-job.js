// A new job: a file is dropped, checked here and by the server, shown token by token, and trained on.

import { Button, Field, Name, Notice, Panel, bytes, digits, duration, html, toast, useEffect, useJson, useMemo, useState } from "../ui.js";
import { post, request } from "../api.js";
import { Drop, Options, jobLink, named, suffixOf, useDraft } from "./common.js";

const LOOKED_AT = 64 * 2 ** 20; // bytes of a file whose lines are checked before it is sent
const MOST_PROBLEMS = 5;
const SHOWN = 4; // records of the preview
const EMPTY = { body: null, filename: "", size: 0, validation: "" };

// Problems of a JSON lines file by line, found before it is sent: the server checks all other formats, and what
// a record needs.
async function problemsOf(file) {
  if (!/\.(jsonl|ndjson)$/i.test(file.name)) return [];
  const found = [];
  let number = 0, rest = "";
  const check = (line) => {
    number += 1;
    if (!line.trim() || found.length >= MOST_PROBLEMS) return;
    try {
      const value = JSON.parse(line);
      if (value === null || typeof value !== "object" || Array.isArray(value)) found.push(`line ${number}: expected an object, as {"messages": [...]}, and found ${Array.isArray(value) ? "a list" : value === null ? "null" : `a ${typeof value}`}`);
      else if (Array.isArray(value.messages) && !value.messages.length) found.push(`line ${number}: "messages" is empty`);
    } catch (error) {
      found.push(`line ${number}: no valid JSON (${error.message})`);
    }
  };
  const reader = file.slice(0, LOOKED_AT).stream().pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    lines.forEach(check);
    if (found.length >= MOST_PROBLEMS) return found;
  }
  if (rest && file.size <= LOOKED_AT) check(rest);
  if (!number && file.size <= LOOKED_AT) found.push("The file is empty.");
  return found;
}

async function upload(file) {
  const form = new FormData();
  form.append("purpose", "fine-tune");
  form.append("file", file, file.name);
  return (await request("POST", "/v1/files", { body: form })).json();
}

export function NewJob({ from }) {
  const [draft, setDraft] = useDraft(from ? "clone" : "job", EMPTY);
  const [busy, setBusy] = useState("");
  const [problems, setProblems] = useState(null);
  useEffect(() => { if (from) setDraft({ ...EMPTY, body: from }); }, []);
  const choices = useJson("/v1/fine_tuning/choices");
  const body = draft.body;
  const take = async ([file]) => {
    setProblems(null);
    setBusy(`Checking ${file.name} …`);
    try {
      const found = await problemsOf(file);
      if (found.length) return setProblems({ name: file.name, lines: found });
      setBusy(`Sending ${file.name}, ${bytes(file.size)} …`);
      const sent = await upload(file);
      const model = body?.model ?? choices.data?.models[0] ?? (await (await request("GET", "/v1/fine_tuning/choices")).json()).models[0];
      setDraft({ body: { ...(body ?? { suffix: suffixOf(file.name) }), model, training_file: sent.id }, filename: file.name, size: file.size });
    } catch (error) {
      setProblems({ name: file.name, lines: [error.message] });
    } finally {
      setBusy("");
    }
  };
  return html`<${Panel} title=${from ? "Clone a job" : "New job"} aside=${body && html`<${Button} quiet onClick=${() => { setDraft(EMPTY); if (from) location.hash = "#/jobs"; }}>Discard<//>`}>
    ${!body && html`<${Drop} label="Drop your training data here, or choose a file" hint="JSON lines of chats, prompts and completions, or pairs; also .json, .csv, .parquet or .txt" busy=${busy} onFiles=${take} />`}
    ${problems && html`<div class="notice error" role="alert"><strong><bdi>${problems.name}</bdi> was not taken.</strong><ul>${problems.lines.map((line) => html`<li><bdi>${line}</bdi></li>`)}</ul></div>`}
    ${body && html`<${Form} draft=${draft} setDraft=${setDraft} choices=${choices.data} onFiles=${take} busy=${busy} />`}<//>`;
}

// The few settings that matter; all others are in the body as JSON.
function Form({ draft, setDraft, choices, onFiles, busy }) {
  const { body } = draft;
  const [wrongs, setWrongs] = useState({});
  const [valid, setValid] = useState(null); // the server's validation
  const [error, setError] = useState(null);
  const text = useMemo(() => JSON.stringify(body, null, 2), [body]);
  useEffect(() => {
    const stop = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const found = await post(`/v1/fine_tuning/validate?show=${SHOWN}`, body, { signal: stop.signal });
        setValid(found); setError(null);
      } catch (problem) { if (problem.name !== "AbortError") { setError(problem); setValid(null); } }
    }, 400);
    return () => { clearTimeout(timer); stop.abort(); };
  }, [text]);
  const change = (fields) => setDraft((old) => ({ body: tidy({ ...old.body, ...fields }) }));
  const type = body.method?.type ?? "supervised";
  const own = body.method?.[type] ?? {};
  const settings = own.hyperparameters ?? body.hyperparameters ?? {};
  const setOwn = (fields) => change({ hyperparameters: undefined, method: { type, [type]: { ...own, hyperparameters: settings, ...fields } } });
  const setting = (name) => (value) => setOwn({ hyperparameters: { ...settings, [name]: value } });
  const adapter = Array.isArray(body.peft) ? body.peft[0] : body.peft ?? {};
  const numberField = (label, name, value, onValue, hint, step = "any") => html`<${Field} label=${label} hint=${hint} error=${wrongs[name]}>
    <input type="number" min="0" step=${step} placeholder="auto" value=${value === "auto" || value == null ? "" : value} onInput=${({ target }) => { setWrongs({ ...wrongs, [name]: target.validity.badInput ? "Enter a number." : null }); if (!target.validity.badInput) onValue(target.value === "" ? undefined : Number(target.value)); }} /><//>`;
  const json = (label, name, value, onValue, hint, rows = 6) => html`<${JsonField} label=${label} value=${value} onValue=${onValue} hint=${hint} rows=${rows} />`;
  const start = async () => {
    const job = await post("/v1/fine_tuning/jobs", body);
    setDraft(EMPTY);
    location.hash = jobLink(job.id);
    toast("The job is created.");
  };
  const chooseValidation = async ({ target }) => {
    const [file] = target.files;
    target.value = "";
    if (!file) return;
    const found = await problemsOf(file);
    if (found.length) throw Object.assign(new Error(`${file.name}: ${found[0]}`), { name: "Problem" });
    const sent = await upload(file);
    setDraft((old) => ({ body: { ...old.body, validation_file: sent.id }, validation: file.name }));
  };
  return html`<div class="stack">
    <p>Data: <strong><${Name} text=${draft.filename || body.training_file} /></strong> ${draft.size ? html`<small>${bytes(draft.size)}</small>` : ""} <label class="link">${busy || "another file"}<input type="file" class="hidden" onChange=${({ target }) => { if (target.files.length) onFiles([...target.files]); target.value = ""; }} /></label></p>
    <div class="fields">
      <${Field} label="Model" hint="The base, or an adapter to go on from"><input list="job-models" value=${body.model} onInput=${({ target }) => change({ model: target.value })} /><//>
      <datalist id="job-models">${(choices?.models ?? []).map((one) => html`<option value=${one} />`)}</datalist>
      <${Field} label="Name" hint="Part of the adapter's name"><input value=${body.suffix ?? ""} maxlength="64" spellcheck="false" onInput=${({ target }) => change({ suffix: named(target.value) })} /><//>
      <${Field} label="Method" hint="What training minimises"><select onChange=${({ target }) => change({ method: { type: target.value, [target.value]: {} }, hyperparameters: undefined })}><${Options} names=${choices?.methods ?? [type]} chosen=${type} /></select><//>
      ${numberField("Epochs", "epochs", settings.n_epochs, setting("n_epochs"), `auto: ${valid?.method[valid.method.type]?.hyperparameters.n_epochs ?? "by the number of examples"}`, 1)}
      <${Field} label="Validation file" hint=${body.validation_file ? html`<${Name} text=${draft.validation || body.validation_file} />` : "Optional: its loss is drawn beside"}><input type="file" onChange=${(event) => chooseValidation(event).catch((problem) => toast(problem.message, "error"))} /><//>
      ${type === "distillation" && html`<${Field} label="Teacher" hint="The model to learn from"><input value=${own.teacher ?? ""} onInput=${({ target }) => setOwn({ teacher: target.value })} /><//>`}
    </div>
    ${type === "reinforcement" && json("Grader (JSON)", "grader", own.grader, (grader) => setOwn({ grader }), 'What rewards an answer, such as {"type": "string_check", "name": "equal", "operation": "eq", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}')}
    <details><summary>More settings</summary><div class="fields">
      ${numberField("Learning rate multiplier", "rate", settings.learning_rate_multiplier, setting("learning_rate_multiplier"), "auto: 1, by the model's width")}
      ${numberField("Batch size", "batch", settings.batch_size, setting("batch_size"), `auto: ${valid?.method[valid.method.type]?.hyperparameters.batch_size ?? "by the number of examples"}`, 1)}
      <${Field} label="Adapter method" hint="LoRA unless another is chosen"><select onChange=${({ target }) => change({ peft: target.value === "lora" ? undefined : { type: target.value } })}><${Options} names=${choices?.adapters.length ? choices.adapters : [adapter.type ?? "lora"]} chosen=${adapter.type ?? "lora"} /></select><//>
      ${(adapter.type ?? "lora") === "lora" && numberField("LoRA rank", "rank", adapter.r, (r) => change({ peft: tidy({ ...adapter, r }) }), "", 1)}
      <${Field} label="Schedule of the learning rate" hint=""><select onChange=${({ target }) => change({ optimizer: { ...body.optimizer, schedule: target.value } })}><${Options} names=${choices?.schedules ?? ["linear"]} chosen=${body.optimizer?.schedule ?? "linear"} /></select><//>
      <${Field} label="Examples that are too long" hint=${valid?.too_long.limit ? `longer than ${valid.too_long.limit} tokens: ${valid.too_long.count}` : ""}><select value=${body.optimizer?.too_long ?? "error"} onChange=${({ target }) => change({ optimizer: { ...body.optimizer, too_long: target.value } })}><option value="error">refuse the job</option><option value="skip">leave them out</option><option value="truncate">cut their ends</option></select><//>
      ${numberField("Seed", "seed", body.seed, (seed) => change({ seed }), "auto: drawn", 1)}
    </div></details>
    <details><summary>The whole request as JSON</summary>${json("Request", "body", body, (found) => setDraft({ body: found }), "Every setting of POST /v1/fine_tuning/jobs; what is changed here is in the fields above too", 14)}</details>
    <${Notice} error=${error ?? valid?.error} />
    <div class="row"><${Button} disabled=${!valid?.valid} onClick=${start}>Start training<//><${Expected} valid=${valid} /></div>
    ${valid && html`<${Preview} valid=${valid} />`}</div>`;
}

function Expected({ valid }) {
  if (!valid) return html`<small aria-busy="true">The server looks at the data …</small>`;
  const { records, examples, steps, expected_seconds: seconds, memory, tokens } = valid;
  const facts = [
    `${digits(examples.trained)} of ${digits(records.total ?? records.read)} records`, tokens && `${digits(tokens.total)} tokens`, `${steps} steps`,
    seconds !== null && `about ${duration(seconds)} alone`, memory && `${bytes(memory.needed)} of ${bytes(memory.available)} memory`,
    examples.truncated && `${examples.truncated} cut`, examples.skipped && `${examples.skipped} left out`, examples.dropped && `${examples.dropped} with nothing to learn`,
  ].filter(Boolean);
  return html`<small>${facts.join(" · ")}${valid.ignored.length ? html` · not read: <bdi>${valid.ignored.join(", ")}</bdi>` : ""}</small>`;
}

// The first records token by token: those that are trained stand out, the others are masked.
function Preview({ valid }) {
  const [at, setAt] = useState(0);
  const { shown, format } = valid;
  if (!shown.length) return null;
  const one = shown[Math.min(at, shown.length - 1)];
  const trained = one.tokens.filter((token) => token.trained).length;
  return html`<section class="stack preview" aria-label="Preview"><div class="row"><h3>What is trained</h3><small>${format}; <mark>marked</mark> tokens are trained, the others are only read. ${trained} of ${one.tokens.length} here.</small></div>
    <div class="row" role="group" aria-label="Records">${shown.map((each, place) => html`<button type="button" class=${place === at ? "" : "quiet"} aria-pressed=${place === at} onClick=${() => setAt(place)}>${each.rejected ? "rejected" : `record ${shown.slice(0, place + 1).filter((other) => !other.rejected).length}`}</button>`)}</div>
    <div class="tokens mono" tabindex="0" role="region" aria-label="Tokens of a record">${one.tokens.map((token) => html`<${token.trained ? "mark" : "span"}>${token.text}<//>`)}${one.total_tokens > one.tokens.length ? html`<small> … ${one.total_tokens - one.tokens.length} more tokens</small>` : ""}</div></section>`;
}

// A field whose text is JSON; \`onValue\` gets what it says once it can be read.
export function JsonField({ label, value, onValue, hint, rows = 6 }) {
  const [text, setText] = useState(null); // while it is edited
  const [error, setError] = useState(null);
  const shown = text ?? (value === undefined ? "" : JSON.stringify(value, null, 2));
  const edit = ({ target }) => {
    setText(target.value);
    if (!target.value.trim()) { setError(null); return onValue(undefined); }
    try {
      const found = JSON.parse(target.value);
      if (found === null || typeof found !== "object") throw new Error("expected an object or a list");
      setError(null);
      onValue(found);
    } catch (problem) { setError(`No valid JSON: ${problem.message}`); }
  };
  return html`<${Field} label=${label} hint=${hint} error=${error}><textarea class="mono" rows=${rows} spellcheck="false" value=${shown} onInput=${edit} onBlur=${() => { if (!error) setText(null); }}></textarea><//>`;
}

const tidy = (value) => {
  const kept = Object.entries(value).filter(([, one]) => one !== undefined && !(one && typeof one === "object" && !Array.isArray(one) && !Object.keys(one).length));
  return Object.fromEntries(kept);
};

// Keys: the tenant's API keys, and what it uses of what it may.

import { Chart, Empty, Loading, Notice, Panel, Table, bytes, digits, html, useJson, useState, when } from "../ui.js";
import { Options } from "./common.js";

// Names of what is kept, where those of the API tell less.
const CALLED = { jobs: "fine-tuning jobs", events: "events of jobs", creations: "idempotency keys", chat_completions: "stored chats", checkpoint_permissions: "shared checkpoints", response_items: "items of responses" };
const called = (kind) => { const name = CALLED[kind] ?? kind.replaceAll("_", " "); return name[0].toUpperCase() + name.slice(1); };

export default function Keys() {
  const { data, error } = useJson("/web/api/usage", 5);
  if (!data) return html`<${Loading} error=${error} />`;
  const sum = (field) => data.kept.reduce((all, one) => all + one[field], 0);
  const files = data.kept.find((one) => one.kind === "files")?.rows ?? 0;
  const columns = [
    { head: "Key", cell: (key) => html`<code>${key.prefix}…</code>` }, { head: "Id", cell: (key) => html`<span class="mono">${key.id}</span>` },
    { head: "Created", cell: (key) => when(key.created) },
    { head: "State", cell: (key) => (key.revoked ? html`<span class="badge bad">revoked ${when(key.revoked)}</span>` : html`<span class="badge good">in force</span>`) },
  ];
  return html`<${Notice} error=${error} />
    <div class="split">
      <${Panel} title=${html`Keys of <bdi>${data.tenant}</bdi>`} aside=${`share of the machine: ${digits(data.weight)}`}>
        <${Table} label="Keys" columns=${columns} rows=${data.keys} empty="There is no key: the server answers everybody on this machine, and nobody else." />
        <p class="empty">Keys are made where the server runs; the secret is shown once, and kept nowhere.</p>
        <pre>coserve keys create ${data.tenant}${"\n"}coserve keys revoke KEY</pre><//>
      <${Panel} title="Used of what is allowed"><div class="stack">
        <${Meter} name="Storage" value=${sum("bytes")} most=${data.limits.bytes} format=${bytes} />
        <${Meter} name="Records" value=${sum("rows")} most=${data.limits.records} />
        <${Meter} name="Files" value=${files} most=${data.limits.files} />
        <${Meter} name="Jobs that are not over" value=${data.unfinished_jobs} most=${data.limits.jobs} />
        <${Meter} name="Requests waiting" value=${data.waiting} most=${data.limits.waiting} />
        <small>${data.limits.requests_minute ? `${data.limits.requests_minute.toLocaleString()} requests a minute` : "Any number of requests a minute"}; ${data.running} running now.</small></div><//>
    </div>
    <${Usage} />
    <${Panel} title="What the server keeps"><${Table} label="Kept records" rowKey=${(row) => row.kind} rows=${data.kept} empty="Nothing yet."
      columns=${[{ head: "Kind", cell: (row) => called(row.kind) }, { head: "Number", number: true, cell: (row) => row.rows.toLocaleString() }, { head: "Size", number: true, cell: (row) => bytes(row.bytes) }]} /><//>`;
}

function Meter({ name, value, most, format = digits }) {
  return html`<div><div class="meter-head"><span>${name}</span><span>${format(value)} <small>of ${format(most)}</small></span></div>
    <meter aria-label=${name} min="0" max=${most} high=${0.9 * most} value=${value}>${format(value)}</meter></div>`;
}

const SPANS = { "24 hours": [3600, 24], "7 days": [3600, 168], "31 days": [86400, 31] }; // seconds of a bucket, and how many
const COUNTS = { "output tokens": "output_tokens", "input tokens": "input_tokens", "trained tokens": "trained_tokens", requests: "num_model_requests" };
const MOST_KEYS = 5; // that have a line of their own

// What each key has used, hour by hour or day by day. Jobs train, not keys.
function Usage() {
  const [span, setSpan] = useState("24 hours"), [shown, setShown] = useState("output tokens");
  const [width, count] = SPANS[span];
  const begin = (Math.floor(Date.now() / 1000 / width) - count + 1) * width;
  const { data, error } = useJson(`/v1/usage?start_time=${begin}&bucket_width=${width === 3600 ? "1h" : "1d"}&group_by=api_key_id&limit=${count}`, 30);
  const x = Array.from({ length: count }, (_, at) => begin + at * width), keys = new Map();
  for (const bucket of data?.data ?? []) {
    for (const one of bucket.results) {
      const used = one[COUNTS[shown]], at = (bucket.start_time - begin) / width, name = one.api_key_id ? `${one.api_key_id}…` : shown === "trained tokens" ? "jobs" : "without a key";
      if (!used || !(at in x)) continue;
      if (!keys.has(name)) keys.set(name, x.map(() => 0));
      keys.get(name)[at] += used;
    }
  }
  const sum = (values) => values.reduce((all, n) => all + n, 0);
  const lines = [...keys].sort(([, a], [, b]) => sum(b) - sum(a)), rest = lines.splice(MOST_KEYS);
  if (rest.length) lines.push([`${rest.length} more keys`, x.map((_, at) => sum(rest.map(([, values]) => values[at])))]);
  const all = sum(lines.flatMap(([, values]) => values));
  const pick = (label, options, value, set) => html`<select aria-label=${label} value=${value} onChange=${({ target }) => set(target.value)}><${Options} names=${Object.keys(options)} chosen=${value} /></select>`;
  return html`<${Panel} title="Used by each key" aside=${html`<span class="row">${pick("Count", COUNTS, shown, setShown)}${pick("Span", SPANS, span, setSpan)}</span>`}><${Notice} error=${error} />
    ${lines.length ? html`<${Chart} label="Usage by key over the last ${span}" x=${x} height=${220} series=${lines.map(([name, values], at) => ({ name, values, color: at + 1, fill: !at }))} /><small>${digits(all)} ${shown} in ${span}, ${width === 3600 ? "an hour" : "a UTC day"} at each point.</small>`
      : html`<${Empty}>No ${shown} in the last ${span}.<//>`}<//>`;
}

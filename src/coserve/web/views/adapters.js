// Adapters: bring them in and out, see what they come from, where they are and what uses them.

import { Button, Dialog, Field, Name, Notice, Panel, Table, bytes, digits, html, toast, useJson, usePages, useState, when } from "../ui.js";
import { post, remove, request } from "../api.js";
import { Confirm, Copyable, Drop, Unseen, chatLink, jobLink, suffixOf, useDraft, useReload } from "./common.js";

const at = (name, what = "") => `/v1/adapters/${encodeURIComponent(name)}${what}`;

export default function Adapters({ rest }) {
  const adapters = usePages("/v1/adapters", 50);
  useReload(adapters, 3);
  const [open, setOpen] = useState(rest[0] ? { kind: "lineage", name: rest[0] } : null);
  const close = () => setOpen(null);
  const pin = async (one) => { if (one.pinned) await remove(at(one.id, "/pin")); else await post(at(one.id, "/pin"), undefined); adapters.reload(); };
  const columns = [
    { head: "Adapter", wide: true, cell: (one) => html`<${Name} text=${one.id} most=${60} />${one.warning && html` <span class="badge warn" title=${one.warning}>other base</span>`}` },
    { head: html`<${Unseen} text="Chat" />`, cell: (one) => html`<a href=${chatLink(one.id)}>Chat</a>` },
    { head: "Size", number: true, cell: (one) => (one.bytes ? bytes(one.bytes) : "") },
    { head: "Where", cell: (one) => html`<span class="badge ${one.location === "memory" ? "good" : ""}">${one.location}${one.pinned ? ", pinned" : ""}</span>` },
    { head: "Used by", cell: (one) => html`<${Users} one=${one} />` },
    { head: "From", cell: (one) => (one.job ? html`<a href=${jobLink(one.job)}>its job</a>` : one.owned_by === "coserve" ? "the operator" : "a file") },
    { head: "Created", cell: (one) => when(one.created) },
    { head: html`<${Unseen} text="Actions" />`, cell: (one) => html`<span class="row">${["lineage", "export", "merge"].map((kind) => html`<${Button} quiet onClick=${() => setOpen({ kind, name: one.id })}>${kind[0].toUpperCase() + kind.slice(1)}<//>`)}
      <${Button} quiet onClick=${() => pin(one)}>${one.pinned ? "Unpin" : "Pin"}<//>
      ${one.owned_by !== "coserve" && html`<${Button} danger onClick=${() => setOpen({ kind: "delete", name: one.id })}>Delete<//>`}</span>` },
  ];
  return html`<${Import} onDone=${adapters.reload} />
    <${Panel} title="Adapters"><${Table} label="Adapters" columns=${columns} ...${adapters} empty=${html`No adapters yet: <a href="#/jobs">train one</a>, or drop the files of a PEFT adapter above.`} /><//>
    ${open?.kind === "lineage" && html`<${Lineage} name=${open.name} onClose=${close} />`}
    ${open?.kind === "export" && html`<${Dialog} title="Export" onClose=${close}><div class="stack"><p>PEFT's two files of <${Name} text=${open.name} />, in one zip file or one by one.</p>
      <p class="row"><a class="button" href=${at(open.name, "/archive")} download>Zip file</a><a class="button" href=${at(open.name, "/config")} download="adapter_config.json">adapter_config.json</a><a class="button" href=${at(open.name, "/weights")} download="adapter_model.safetensors">adapter_model.safetensors</a></p>
      <${Copyable} label="Command" text=${`coserve adapters export ${quoted(open.name)} FOLDER`} /></div><//>`}
    ${open?.kind === "merge" && html`<${Dialog} title="Merge" onClose=${close}><div class="stack"><p>Adds the adapter to its base's weights and writes a model of its own, as large as the base. This is done by a command, where the base's files are:</p>
      <${Copyable} label="Command" text=${`coserve adapters merge ${quoted(open.name)} FOLDER`} /></div><//>`}
    ${open?.kind === "delete" && html`<${Confirm} title="Delete this adapter?" word="Delete the adapter" onClose=${close} onYes=${async () => { await remove(`/v1/models/${encodeURIComponent(open.name)}`); toast("The adapter is deleted."); adapters.reload(); }}>
      <p><${Name} text=${open.name} /> goes for good, once the answers that use it have ended. Export it first to keep a copy.</p><//>`}`;
}

const quoted = (name) => (/^[\w@%+=:,./-]+$/.test(name) ? name : `'${name.replaceAll("'", "'\\''")}'`);

function Users({ one }) {
  const parts = [];
  if (one.requests) parts.push(html`<span>${one.requests} ${one.requests === 1 ? "request" : "requests"}</span>`);
  for (const job of one.jobs.slice(0, 3)) parts.push(html`<a href=${jobLink(job)}>job ${job.slice(-6)}</a>`);
  if (one.jobs.length > 3) parts.push(html`<span>${one.jobs.length - 3} more jobs</span>`);
  return parts.length ? html`<span class="row">${parts}</span>` : html`<small>nobody now</small>`;
}

// From the adapter back to its base.
function Lineage({ name, onClose }) {
  const { data, error } = useJson(at(name, "/lineage"));
  const words = { adapter: "Adapter", job: "was trained by the job", training_file: "on", validation_file: "validated with", base: "on the base" };
  const about = (one) => [one.kind === "adapter" && `version ${one.id}`, one.method, one.status, one.steps != null && `${digits(one.steps)} steps`, one.examples != null && `${digits(one.examples)} records`, one.bytes && bytes(one.bytes), one.created_at && when(one.created_at)].filter(Boolean).join(" · ");
  return html`<${Dialog} title="Lineage" onClose=${onClose}><${Notice} error=${error} />
    <ol class="lineage">${(data?.data ?? []).map((one, place) => html`<li class=${one.kind}><small>${one.kind === "adapter" && place ? "which began with" : words[one.kind]}</small>
      ${one.kind === "job" && one.exists ? html`<a href=${jobLink(one.id)} onClick=${onClose}>${one.id}</a>` : html`<strong><${Name} text=${one.name} /></strong>`}
      ${!one.exists && html`<span class="badge">deleted</span>`}<small>${about(one)}</small></li>`)}</ol>
    ${data?.has_more && html`<p>There are more adapters behind these.</p>`}<//>`;
}

function Import({ onDone }) {
  const [draft, setDraft] = useDraft("import", { name: "" });
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState("");
  const take = async (files) => {
    setError(null);
    const archive = files.find((file) => file.name.toLowerCase().endsWith(".zip"));
    const config = files.find((file) => file.name === "adapter_config.json") ?? files.find((file) => file.name.endsWith(".json"));
    const weights = files.find((file) => file.name === "adapter_model.safetensors") ?? files.find((file) => file.name.endsWith(".safetensors"));
    if (!archive && (!config || !weights)) return setError({ message: "Choose both files of one adapter, adapter_config.json and adapter_model.safetensors, or a zip file of them." });
    const name = draft.name.trim() || (archive && suffixOf(archive.name)); // the files of PEFT are all called the same
    if (!name) return setError({ message: "Give the adapter a name first." });
    const form = new FormData();
    form.append("name", name);
    for (const [name, file] of archive ? [["archive", archive]] : [["config", config], ["weights", weights]]) form.append(name, file);
    setBusy(`Sending ${bytes((archive ?? weights).size)} …`);
    try {
      const card = await (await request("POST", "/v1/adapters", { body: form })).json();
      toast(card.warning ?? "The adapter is there.");
      setDraft({ name: "" });
      onDone();
    } catch (problem) { setError(problem); } finally { setBusy(""); }
  };
  return html`<${Panel} title="Import"><div class="fields import">
    <${Field} label="Name" hint="What requests call it" error=${error}><input value=${draft.name} spellcheck="false" onInput=${({ target }) => setDraft({ name: target.value })} /><//>
    <${Drop} label="Drop an adapter's two files here, or a zip file of them" hint="PEFT's adapter_config.json and adapter_model.safetensors" accept=".json,.safetensors,.zip" multiple busy=${busy} onFiles=${take} /></div><//>`;
}

// What the views Playground, Jobs and Adapters share.

import { Button, DRAFTS, Dialog, areDraftsOwn, html, toast, useEffect, useRef, useState } from "../ui.js";

// State that outlives a reload and a closed tab, under `name`. Each tab has its own; a new tab begins with what was
// changed last in any of them, and without that with `initial`.
export function useDraft(name, initial) {
  const key = DRAFTS + name;
  const [value, setValue] = useState(() => {
    try { return { ...initial, ...JSON.parse(sessionStorage.getItem(key) ?? localStorage.getItem(key) ?? "{}") }; } catch { return initial; }
  });
  const newest = useRef(value), saved = useRef(value);
  newest.current = value;
  const save = () => {
    if (saved.current === newest.current) return;
    const text = JSON.stringify((saved.current = newest.current));
    try {
      sessionStorage.setItem(key, text);
      if (areDraftsOwn()) localStorage.setItem(key, text);
    } catch { /* storage is off or full: it lasts for this page */ }
  };
  useEffect(() => { const timer = setTimeout(save, 150); return () => clearTimeout(timer); }, [key, value]);
  useEffect(() => { addEventListener("pagehide", save); return () => { removeEventListener("pagehide", save); save(); }; }, [key]);
  return [value, (changed) => setValue((old) => ({ ...old, ...(typeof changed === "function" ? changed(old) : changed) }))];
}

// A text as part of an adapter's name, which has no other letters; and a file's name as such a part.
export const named = (text) => text.replace(/[^A-Za-z0-9._-]+/g, "-") || undefined;
export const suffixOf = (name) => named(name.replace(/\.[^.]*$/, "").slice(0, 40));

export const chatLink = (model) => `#/playground/${encodeURIComponent(model)}`;
export const jobLink = (id) => `#/jobs/${encodeURIComponent(id)}`;

const KINDS = { running: "good", succeeded: "good", failed: "bad", cancelled: "", queued: "warn", paused: "warn" };
export const Status = ({ job }) => html`<span class="badge ${KINDS[job.status] ?? ""}">${job.stopping ? "saving" : job.status}</span>`;

// Text for screen readers alone: the head of a column that explains itself to who sees it.
export const Unseen = ({ text }) => html`<span class="unseen">${text}</span>`;

// Loads a list's first page again every \`seconds\` while it is the only one, and looked at.
export function useReload({ rows, reload }, seconds) {
  useEffect(() => {
    if (!rows || rows.length > 50) return;
    const timer = setTimeout(() => { if (!document.hidden) reload(); }, seconds * 1000);
    return () => clearTimeout(timer);
  }, [rows, reload, seconds]);
}

// A question before something that cannot be undone.
export function Confirm({ title, children, word, onYes, onClose }) {
  return html`<${Dialog} title=${title} onClose=${onClose}><div class="stack">${children}
    <div class="row"><${Button} danger onClick=${async () => { await onYes(); onClose(); }}>${word}<//><${Button} quiet onClick=${onClose}>Keep it<//></div></div><//>`;
}

// The options of a select, of which one is chosen.
export const Options = ({ names, chosen }) => names.map((name) => html`<option key=${name} value=${name} selected=${name === chosen}>${name}</option>`);

// Text to be copied. Where the browser allows no clipboard it can be selected.
export function Copyable({ text, label }) {
  const copy = async () => {
    try { await navigator.clipboard.writeText(text); toast("Copied."); } catch { toast("This browser copies nothing from here: select the text.", "error"); }
  };
  return html`<div class="stack"><pre tabindex="0" aria-label=${label}>${text}</pre><div><${Button} onClick=${copy}>Copy<//></div></div>`;
}

// Files that are dropped or chosen. `onFiles` gets an array.
export function Drop({ label, hint, accept, multiple, onFiles, busy }) {
  const [over, setOver] = useState(false);
  const drop = (event) => {
    event.preventDefault();
    setOver(false);
    if (event.dataTransfer.files.length) onFiles([...event.dataTransfer.files]);
  };
  return html`<label class="drop ${over ? "over" : ""}" aria-busy=${!!busy} onDragOver=${(event) => { event.preventDefault(); setOver(true); }} onDragLeave=${() => setOver(false)} onDrop=${drop}>
    <strong>${busy || label}</strong><small>${hint}</small>
    <input type="file" accept=${accept} multiple=${multiple} onChange=${({ target }) => { if (target.files.length) onFiles([...target.files]); target.value = ""; }} /></label>`;
}

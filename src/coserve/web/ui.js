// What views are made of. `html` is htm bound to preact; the hooks are preact's.

import { html, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";
import { get } from "./api.js";

export * from "./vendor/preact-htm.js";

// Words and numbers

const SIZES = ["B", "KB", "MB", "GB", "TB"];
export function bytes(n) {
  let step = 0;
  while (n >= 1000 && step < SIZES.length - 1) [n, step] = [n / 1000, step + 1];
  return `${digits(n)} ${SIZES[step]}`;
}

// A number with three digits that count: 0.0123, 1.23, 12.3, 123, 12.3k, 1.23M.
export function digits(n) {
  if (n === null || n === undefined || Number.isNaN(n)) return "–";
  const size = Math.abs(n);
  if (size >= 1e9) return `${(n / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${(n / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(n / 1e3).toPrecision(3)}k`;
  return Number.isInteger(n) || size >= 1000 ? String(Math.round(n)) : String(Number(n.toPrecision(3)));
}

export function duration(seconds) {
  if (seconds < 1) return `${digits(seconds * 1000)} ms`;
  if (seconds < 60) return `${digits(seconds)} s`;
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => seconds >= size);
  const [unit, size] = parts[first];
  const rest = parts[first + 1];
  const more = rest ? Math.floor((seconds % size) / rest[1]) : 0;
  return `${Math.floor(seconds / size)} ${unit}${more ? ` ${more} ${rest[0]}` : ""}`;
}

const pad = (n) => String(n).padStart(2, "0");
export function clock(unix) {
  const at = new Date(unix * 1000);
  return `${pad(at.getHours())}:${pad(at.getMinutes())}${at.getSeconds() ? `:${pad(at.getSeconds())}` : ""}`;
}

// Times that may be at an axis, seconds apart, and how those are written that are days apart: days are UTC's.
const APART = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((n) => n * 60), ...[1, 2, 3, 6, 12].map((n) => n * 3600), ...[1, 2, 7, 14, 28].map((n) => n * 86400)];
const day = (unix) => new Date(unix * 1000).toLocaleDateString(undefined, { month: "short", day: "numeric", timeZone: "UTC" });

export const percent = (share) => `${digits(100 * share)} %`;
export const when = (unix) => (unix ? new Date(unix * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" }) : "–");

// A name that somebody chose: isolated from the direction of the text around it, and never longer than a line.
export function Name({ text, most = 80 }) {
  const whole = String(text ?? "");
  const shown = whole.length > most ? `${whole.slice(0, most - 1)}…` : whole;
  return html`<bdi class="name" title=${whole.slice(0, 500)}>${shown}</bdi>`;
}

// Data

// The JSON at `path`, again every `every` seconds (0: once) while the page is looked at. What has come is kept
// through errors. Returns { data, error, reload }.
export function useJson(path, every = 0) {
  const [found, setFound] = useState({ data: null, error: null });
  const [round, setRound] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    let timer;
    const load = async () => {
      try {
        if (!document.hidden) setFound({ data: await get(path, { signal: stop.signal }), error: null });
      } catch (error) {
        if (error.name !== "AbortError") setFound((old) => ({ data: old.data, error }));
      }
      if (every && !stop.signal.aborted) timer = setTimeout(load, every * 1000);
    };
    load();
    return () => { stop.abort(); clearTimeout(timer); };
  }, [path, every, round]);
  return { ...found, reload: useCallback(() => setRound((n) => n + 1), []) };
}

// A list of the API, page by page: { rows (null before the first), error, hasMore, more, reload }.
export function usePages(path, limit = 50) {
  const [found, setFound] = useState({ rows: null, error: null, hasMore: false });
  const newest = useRef(0);
  const load = useCallback(async (before) => {
    const turn = ++newest.current;
    const after = before?.length ? `&after=${encodeURIComponent(before.at(-1).id)}` : "";
    try {
      const page = await get(`${path}${path.includes("?") ? "&" : "?"}limit=${limit}${after}`);
      if (turn === newest.current) setFound({ rows: [...(before ?? []), ...page.data], error: null, hasMore: !!page.has_more });
    } catch (error) {
      if (turn === newest.current) setFound((old) => ({ ...old, error }));
    }
  }, [path, limit]);
  useEffect(() => { load(null); return () => { newest.current++; }; }, [load]);
  return { ...found, more: () => load(found.rows), reload: useCallback(() => load(null), [load]) };
}

// Drafts: a tab's are in its sessionStorage, the newest of all tabs in localStorage.

export const DRAFTS = "coserve-draft-"; // what their keys begin with
const OWNER = "coserve-drafts-of";

// Drops all drafts but this tenant's own: the next one is not to see prompts of the last.
export function keepDraftsOf(tenant) {
  try {
    for (const storage of [sessionStorage, localStorage]) {
      if (storage.getItem(OWNER) === tenant) continue;
      Object.keys(storage).filter((key) => key.startsWith(DRAFTS)).forEach((key) => storage.removeItem(key));
      storage.setItem(OWNER, tenant);
    }
  } catch { /* storage is off: nothing is kept */ }
}

// False where another tab has logged in as somebody else since.
export const areDraftsOwn = () => sessionStorage.getItem(OWNER) === localStorage.getItem(OWNER);

// Components

export const Notice = ({ error, kind = "error", children }) =>
  error || children ? html`<p class="notice ${kind}" role=${kind === "error" ? "alert" : "note"}>${error?.message ?? children}</p>` : null;

// What has not come yet, or why it does not.
export const Loading = ({ error }) => (error ? html`<${Notice} error=${error} />` : html`<p class="empty" aria-busy="true">Loading …</p>`);

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

export const Panel = ({ title, aside, children, class: extra = "" }) => html`<section class="panel ${extra}">
  ${title && html`<header><h2>${title}</h2>${aside && html`<div class="aside">${aside}</div>`}</header>`}${children}</section>`;

// One figure with its name. `hint` explains it to who points at it.
export const Figure = ({ name, value, note, hint, kind = "" }) => html`<div class="figure ${kind}" title=${hint}>
  <span class="label">${name}</span><strong>${value}</strong>${html`<small>${note ?? "\u00a0"}</small>`}</div>`;

// Rows as a table. A column is { head, cell(row), number, wide }; `empty` says what no rows mean; with `more`
// there is a button for the next page.
export function Table({ label, columns, rows, rowKey = (row) => row.id, empty, hasMore, more, error }) {
  if (!rows) return html`<${Loading} error=${error} />`;
  if (!rows.length) return html`<${Empty}>${empty}<//>`;
  return html`<div class="scrolls" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map((one) => html`<th class=${one.number ? "number" : ""} scope="col">${one.head}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${rowKey(row)}>${columns.map((one) => html`<td class="${one.number ? "number" : ""} ${one.wide ? "wide" : ""}">${one.cell(row)}</td>`)}</tr>`)}</tbody>
  </table></div>${hasMore && html`<${Button} quiet onClick=${more}>Show more<//>`}<${Notice} error=${error} />`;
}

// A button that is busy while what it began runs; an error of that is shown as a toast.
export function Button({ onClick, children, quiet, danger, type = "button", disabled, ...rest }) {
  const [busy, setBusy] = useState(false);
  const press = onClick && (async (event) => {
    setBusy(true);
    try { await onClick(event); } catch (error) { if (error.name !== "AbortError") toast(error.message, "error"); } finally { setBusy(false); }
  });
  return html`<button type=${type} class="${quiet ? "quiet" : ""} ${danger ? "danger" : ""}" disabled=${disabled || busy} aria-busy=${busy} onClick=${press} ...${rest}>${children}</button>`;
}

// A labelled field; `children` is the control, which gets the field's id. `error` is shown below it.
let fields = 0;
export function Field({ label, hint, error, children }) {
  const id = useMemo(() => `field-${++fields}`, []);
  const told = `${id}-told`;
  const control = { ...children, props: { ...children.props, id, "aria-describedby": told, "aria-invalid": error ? "true" : undefined } };
  return html`<div class="field ${error ? "wrong" : ""}"><label for=${id}>${label}</label>${control}
    <small id=${told}>${error?.message ?? error ?? hint ?? ""}</small></div>`;
}

// A modal dialog while it is rendered; `onClose` is called by Escape and by its button.
export function Dialog({ title, onClose, children }) {
  const place = useRef(null);
  useLayoutEffect(() => { place.current.showModal(); }, []);
  return html`<dialog ref=${place} aria-label=${title} onCancel=${(event) => { event.preventDefault(); onClose(); }}>
    <header><h2>${title}</h2><button type="button" class="quiet" aria-label="Close" onClick=${onClose}>✕</button></header>${children}</dialog>`;
}

// A short message that goes by itself; kinds are "done" and "error".
export function toast(text, kind = "done") {
  dispatchEvent(new CustomEvent("toast", { detail: { text, kind } }));
}

export function Toasts() {
  const [shown, setShown] = useState([]);
  useEffect(() => {
    const add = ({ detail }) => {
      const one = { ...detail, id: Math.random() };
      setShown((all) => [...all.slice(-3), one]);
      setTimeout(() => setShown((all) => all.filter((other) => other !== one)), 7000);
    };
    addEventListener("toast", add);
    return () => removeEventListener("toast", add);
  }, []);
  return html`<div class="toasts" role="status" aria-live="polite">${shown.map((one) => html`<p key=${one.id} class="notice ${one.kind}">${one.text}</p>`)}</div>`;
}

// Shares of a whole as one bar: parts are { name, value, color }, where color is a number of the palette.
export function Bar({ parts, total, format = digits, label }) {
  const told = parts.map((part) => `${part.name} ${format(part.value)}`).join(", ");
  return html`<figure class="bar"><div class="track" role="img" aria-label="${label}: ${told}">${parts.map((part) => html`<span class="color-${part.color}" style=${{ width: `${total ? Math.max(100 * part.value / total, 0) : 0}%` }} title="${part.name} ${format(part.value)}"></span>`)}</div>
    <figcaption>${parts.map((part) => html`<span><i class="color-${part.color}"></i>${part.name} <b>${format(part.value)}</b></span>`)}</figcaption></figure>`;
}

// Charts: uPlot, which is fetched when the first one is drawn.

let drawing;
const uPlot = () => (drawing ??= new Promise((resolve, reject) => {
  const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: new URL("./vendor/uplot.css", import.meta.url) });
  const script = Object.assign(document.createElement("script"), { src: new URL("./vendor/uplot.js", import.meta.url) });
  script.onload = () => resolve(window.uPlot);
  script.onerror = () => reject(new Error("The charts' library could not be loaded."));
  document.head.append(style, script);
}));

// Lines over a common axis. `x` are numbers (Unix seconds with `time`), series { name, values, color (of the
// palette), scale, format, fill, points }: those of the second scale have their axis on the right. The legend
// has the newest values, or those under the pointer.
export function Chart({ label, x, series, height = 220, time = true, sync, log }) {
  const place = useRef(null), plot = useRef(null);
  const [at, setAt] = useState(null);
  const [theme, setTheme] = useState(0);
  const scales = [...new Set(series.map((one) => one.scale ?? "y"))];
  const shape = JSON.stringify([series.map((one) => [one.name, one.color, one.scale, one.fill, one.points]), scales, time, log]);
  const formats = useRef({});
  for (const one of series) formats.current[one.scale ?? "y"] = one.format ?? digits;
  const data = [x, ...series.map((one) => one.values)];
  const newest = useRef(data);
  newest.current = data;
  useEffect(() => {
    const turn = () => setTheme((n) => n + 1);
    addEventListener("theme", turn);
    return () => removeEventListener("theme", turn);
  }, []);
  useLayoutEffect(() => {
    let gone = false, watching;
    uPlot().then((Plot) => {
      if (gone || !place.current) return;
      const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
      const axis = { stroke: of("--faint"), grid: { stroke: of("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
      plot.current = new Plot({
        width: place.current.clientWidth, height, legend: { show: false }, padding: [8, 14, 0, 0],
        cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false }, sync: sync ? { key: sync } : undefined },
        scales: { x: {}, ...Object.fromEntries(scales.map((name) => [name, { distr: log === name ? 3 : 1, range: log === name ? undefined : (_, least, most) => [Math.min(0, least ?? 0), most > 0 ? most * 1.08 : 1] }])) },
        axes: [{ ...axis, grid: { show: false }, size: 26, space: 64, ...(time ? { incrs: APART, values: (_, ticks, at, space, apart) => ticks.map(apart < 86400 ? clock : day) } : {}) }, ...scales.slice(0, 2).map((name, side) => ({
          ...axis, scale: name, side: side ? 1 : 3, size: 56, grid: side ? { show: false } : axis.grid,
          values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : formats.current[name](tick))),
        }))],
        series: [{}, ...series.map((one) => ({
          scale: one.scale ?? "y", stroke: of(`--color-${one.color}`), width: 1.5, spanGaps: true, points: { show: !!one.points, size: 4 },
          fill: one.fill ? `${of(`--color-${one.color}`)}22` : undefined, paths: one.points === "only" ? () => null : undefined,
        }))],
        hooks: { setCursor: [(self) => setAt(self.cursor.idx ?? null)] },
      }, newest.current, place.current);
      watching = new ResizeObserver(() => plot.current?.setSize({ width: place.current.clientWidth, height }));
      watching.observe(place.current);
    }).catch((error) => toast(error.message, "error"));
    return () => { gone = true; watching?.disconnect(); plot.current?.destroy(); plot.current = null; };
  }, [shape, theme, height, sync]);
  useLayoutEffect(() => { plot.current?.setData(newest.current); });
  const last = (values) => { for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i]; return null; };
  const shown = series.map((one) => [one, at === null ? last(one.values) : one.values[at]]);
  return html`<figure class="chart"><figcaption>${shown.map(([one, value]) => html`<span><i class="color-${one.color}"></i>${html`<${Name} text=${one.name} most=${40} />`} <b>${value === null || value === undefined ? "–" : (one.format ?? digits)(value)}</b></span>`)}</figcaption>
    <div ref=${place} class="plot" role="img" aria-label=${label} style=${{ height: `${height}px` }}></div></figure>`;
}

// Now: the steps as they run. What answers and what trains is drawn over one time axis.

import { Bar, Chart, Empty, Figure, Name, Notice, Panel, Table, bytes, digits, duration, html, percent, useEffect, useMemo, useJson, useState } from "../ui.js";
import { stream } from "../api.js";

const KEPT = 600; // samples: ten minutes
const MOST_LINES = 4; // jobs whose losses are drawn

// Follows the server's samples, and connects again by itself. Returns { rows (by field), own, now, mine, lost }.
function useSamples() {
  const [seen, setSeen] = useState({ fields: null, rows: [], own: [], now: {}, mine: {}, lost: null });
  useEffect(() => {
    const stop = new AbortController();
    const take = (told) => setSeen((old) => {
      const anew = !!told.fields; // the first message of a connection has all that is kept
      const keep = (before, more) => (anew ? more : [...before, ...more]).slice(-KEPT);
      return { fields: told.fields ?? old.fields, rows: keep(old.rows, told.rows), own: keep(old.own, told.own), now: told.now, mine: told.mine, lost: false };
    });
    (async () => {
      while (!stop.signal.aborted) {
        let error = { message: "The server has ended the connection. This page connects again by itself." };
        try {
          for await (const told of stream("/web/api/live", { signal: stop.signal })) take(told);
        } catch (found) {
          if (found.name === "AbortError" || found.status === 401) return;
          error = found;
        }
        setSeen((old) => ({ ...old, lost: error }));
        await new Promise((resolve) => setTimeout(resolve, 1500));
      }
    })();
    return () => stop.abort();
  }, []);
  return seen;
}

export default function Now() {
  const seen = useSamples();
  const jobs = useJson("/v1/fine_tuning/jobs?limit=20", 4);
  const names = useMemo(() => new Map((jobs.data?.data ?? []).map((job) => [job.id, job.user_provided_suffix || job.id])), [jobs.data]);
  if (!seen.fields) return html`<${Notice} error=${seen.lost || null} /><${Waiting} />`;
  const place = Object.fromEntries(seen.fields.map((name, at) => [name, at]));
  const column = (name, scale = 1) => seen.rows.map((row) => (row[place[name]] === null ? null : row[place[name]] * scale));
  const last = Object.fromEntries(seen.fields.map((name, at) => [name, seen.rows.at(-1)[at]]));
  const recent = (name, count = 10) => seen.rows.slice(-count).reduce((sum, row) => sum + row[place[name]], 0) / Math.min(count, seen.rows.length);
  const newest = (name) => { for (let at = seen.rows.length - 1; at >= Math.max(0, seen.rows.length - 60); at--) { const found = seen.rows[at][place[name]]; if (found !== null) return found; } return null; };
  const x = column("time"), { now, mine } = seen;
  const running = (jobs.data?.data ?? []).filter((job) => job.status === "running" || job.status === "queued");
  const met = recent("met", 60), missed = recent("missed", 60);
  return html`<${Notice} error=${seen.lost || null} />
    ${now.unreadable && html`<${Notice} kind="warn">All work waits: ${now.unreadable}<//>`}
    <div class="figures">
      <${Figure} kind="answers" name="Answered" value="${digits(recent("answered"))} tok/s" note="${digits(recent("prompt"))} prompt tok/s" />
      <${Figure} kind="trains" name="Trained" value="${digits(recent("trained"))} tok/s" note=${`${running.filter((job) => job.status === "running").length} of your jobs run`} />
      <${Figure} name="Between tokens" value=${newest("gap") === null ? "–" : duration(newest("gap"))} note=${newest("slowest_gap") === null ? "no answers lately" : `slowest ${duration(newest("slowest_gap"))}`} />
      <${Figure} name="First token" value=${newest("first_token") === null ? "–" : duration(newest("first_token"))} note="mean" />
      <${Figure} name="Within bounds" value=${met + missed ? percent(met / (met + missed)) : "–"} note="of the last minute" hint="Answers that ended within all of their latency bounds" />
      <${Figure} name="Slack used" value=${percent(recent("deferred", 30))} note="slowdown ${digits(last.slowdown)}×" hint="Share of answers' time that training took, of those that ended in the last seconds" />
      <${Figure} name="Steps" value="${digits(recent("steps"))} /s" note="${digits(recent("fused_steps"))} /s do both" />
      <${Figure} name="Queue" value=${last.waiting} note="${last.running} run${now.places ? ` of ${now.places}` : ""}" />
    </div>
    <${Together} x=${x} column=${column} own=${seen.own} names=${names} />
    <div class="grid">
      <${Panel} title="Tokens per second"><${Chart} label="Tokens per second: answered, of prompts, trained" sync="now" height=${180} x=${x} series=${[
        { name: "answered", values: column("answered"), color: 1, fill: true }, { name: "prompts", values: column("prompt"), color: 3 }, { name: "trained", values: column("trained"), color: 2, scale: "trained", fill: true }]} /><//>
      <${Panel} title="Slack used by training"><${Chart} label="Share of answers' time that training took, and slowdown" sync="now" height=${180} x=${x} series=${[
        { name: "of answers' time", values: column("deferred", 100), color: 2, fill: true, format: (n) => `${digits(n)} %` }]} /><//>
      <${Panel} title="Requests"><${Chart} label="Requests that run and that wait" sync="now" height=${180} x=${x} series=${[
        { name: "running", values: column("running"), color: 1, fill: true }, { name: "waiting", values: column("waiting"), color: 5 }]} /><//>
    </div>
    <div class="grid"><${Queue} now=${now} mine=${mine} last=${last} jobs=${running} /><${Memory} now=${now} mine=${mine} last=${last} /></div>
    <${Usage} own=${seen.own} names=${names} answered=${recent("answered", 60)} />`;
}

// Nothing has come yet: the same frames, so that nothing moves when it does.
const Waiting = () => html`<div class="figures" aria-busy="true">${["Answered", "Trained", "Between tokens", "First token", "Within bounds", "Slack used", "Steps", "Queue"].map((name) => html`<${Figure} name=${name} value="–" />`)}</div>`;

// Latency of what answers and loss of what trains, one time axis.
function Together({ x, column, own, names }) {
  const jobs = useMemo(() => {
    const found = new Map();
    for (const one of own) for (const id of Object.keys(one?.jobs ?? {})) found.set(id, (found.get(id) ?? 0) + 1);
    return [...found.keys()].slice(-MOST_LINES);
  }, [own]);
  const losses = jobs.map((id, at) => ({ name: `loss of ${names.get(id) ?? id}`, color: [2, 5, 4, 3][at], scale: "loss", values: own.map((one) => one?.jobs?.[id]?.[0] ?? null) }));
  const ms = (n) => `${digits(n)} ms`;
  return html`<${Panel} title="Answers' latency beside training's loss" aside="ten minutes">
    <${Chart} label="Time between tokens and training loss over the last ten minutes" sync="now" height=${260} x=${x} series=${[
      { name: "between tokens", values: column("gap", 1000), color: 1, format: ms, fill: true }, { name: "slowest", values: column("slowest_gap", 1000), color: 6, format: ms, points: "only" }, ...losses]} />
    ${!jobs.length && html`<${Empty}>None of your jobs has trained in the last ten minutes.<//>`}<//>`;
}

function Queue({ now, mine, last, jobs }) {
  const rows = (mine.waits ?? []).map((one) => ({ id: one.id, who: html`<${Name} text=${one.model} most=${40} /> <small>${digits(one.prompt)} prompt tokens</small>`, since: one.seconds, why: one.why }));
  const more = mine.waiting - rows.length;
  if (more > 0) rows.push({ id: "own", who: html`${more} more of your requests`, why: now.waits });
  if (last.waiting > mine.waiting) rows.push({ id: "others", who: html`${last.waiting - mine.waiting} of other tenants`, why: now.waits });
  for (const job of jobs) if (job.waiting_for) rows.push({ id: job.id, who: html`job <${Name} text=${job.user_provided_suffix || job.id} most=${40} />`, why: job.waiting_for });
  return html`<${Panel} title="What waits, and why" aside=${now.engine_waiting ? `${now.engine_waiting} in the engine` : ""}><${Table} label="What waits" rows=${rows} empty="Nothing waits." columns=${[{ head: "Who", cell: (row) => row.who }, { head: "For", number: true, cell: (row) => (row.since === undefined ? "" : duration(row.since)) }, { head: "Waits because", wide: true, cell: (row) => row.why }]} /><//>`;
}

function Memory({ now, mine, last }) {
  const parts = Object.entries(now.memory ?? {}).filter(([, n]) => n).sort((a, b) => b[1] - a[1]).map(([name, value], at) => ({ name, value, color: (at % 6) + 1 }));
  const pages = now.pages ?? 0, cached = now.cached_pages ?? 0, free = (now.free_pages ?? 0) - cached;
  const [states, places] = now.states ?? [0, 0], [kept, slots] = now.kept_states ?? [0, 0];
  const { pages: own = 0, adapters = {}, jobs = {} } = mine.holds ?? {};
  const inPages = pages - free - cached, each = pages ? (now.memory?.pages ?? 0) / pages : 0;
  const rows = [
    ...(own ? [{ id: "pages", what: `${own} pages of your requests`, bytes: own * each }] : []),
    ...(adapters.own ?? []).map(([id, name, n]) => ({ id, what: html`adapter <${Name} text=${name} most=${50} />`, bytes: n })),
    ...(jobs.own ?? []).map(([id, name, n]) => ({ id, what: html`job <${Name} text=${name} most=${50} />`, bytes: n })),
    ...(adapters.more + jobs.more > 0 ? [{ id: "more", what: "more of yours", bytes: adapters.more + jobs.more }] : []),
    ...[["adapters", adapters.others], ["jobs", jobs.others], ["pages", (inPages - own) * each]].filter(([, n]) => n > 0).map(([name, n]) => ({ id: `others ${name}`, what: `${name} of others`, bytes: n })),
  ];
  return html`<${Panel} title="Memory and pages" aside=${now.memory_budget ? `budget ${bytes(now.memory_budget)}` : ""}><div class="stack">
    <${Bar} label="Memory by what it is for" total=${parts.reduce((sum, part) => sum + part.value, 0)} format=${bytes} parts=${parts} />
    <${Bar} label="Pages" total=${pages} parts=${[{ name: "pages in use", value: inPages, color: 1 }, { name: "cached", value: cached, color: 3 }, { name: "free", value: free, color: 0 }]} />
    ${places > 0 && html`<${Bar} label="Recurrent states" total=${places + slots} parts=${[{ name: "states in use", value: states, color: 1 }, { name: "cached", value: kept, color: 3 }, { name: "free", value: places + slots - states - kept, color: 0 }]} />`}
    <${Table} label="Memory by owner" rows=${rows} empty="No request, adapter or job holds any of it." columns=${[{ head: "Of this", wide: true, cell: (row) => row.what }, { head: "Memory", number: true, cell: (row) => bytes(Math.round(row.bytes)) }]} />
    <small>Adapters: ${now.known ?? 0} known, ${last.adapters} in memory, ${now.pinned ?? 0} pinned${now.swap_pages ? `; ${percent(last.swap_used)} of the second tier used` : ""}.</small></div><//>`;
}

// Tokens of the last minute by adapter and job, one's own; of others only how many.
function Usage({ own, names, answered }) {
  const rows = useMemo(() => {
    const found = new Map();
    const last = own.slice(-60);
    for (const one of last) {
      for (const [name, [tokens, gap, slowest]] of Object.entries(one?.models ?? {})) {
        const row = found.get(`m ${name}`) ?? { id: `m ${name}`, kind: "answers", name, tokens: 0, gap: null, slowest: 0 };
        found.set(row.id, { ...row, tokens: row.tokens + tokens, gap: gap ?? row.gap, slowest: Math.max(row.slowest, slowest ?? 0) });
      }
      for (const [id, [loss, tokens, step]] of Object.entries(one?.jobs ?? {})) {
        const row = found.get(`j ${id}`) ?? { id: `j ${id}`, kind: "trains", name: names.get(id) ?? id, tokens: 0 };
        found.set(row.id, { ...row, tokens: row.tokens + tokens, loss, step });
      }
    }
    const answers = [...found.values()].filter((row) => row.kind === "answers").reduce((sum, row) => sum + row.tokens, 0);
    const others = Math.round(answered * last.length) - answers;
    if (others > Math.max(10, 0.05 * answers)) found.set("others", { id: "others", kind: "answers", name: "other tenants", tokens: others });
    return [...found.values()].sort((a, b) => b.tokens - a.tokens);
  }, [own, names, answered]);
  const seconds = Math.min(own.length, 60) || 1;
  return html`<${Panel} title="By adapter and job" aside="the last minute"><${Table} label="Use by adapter and job" rows=${rows} empty=${html`Nothing has answered or trained in the last minute: <a href="#/playground">ask a model</a>, or <a href="#/jobs">train an adapter</a>.`} columns=${[
    { head: "Work", cell: (row) => html`<span class="badge">${row.kind}</span>` }, { head: "Adapter or job", wide: true, cell: (row) => html`<${Name} text=${row.name} />` },
    { head: "Tokens/s", number: true, cell: (row) => digits(row.tokens / seconds) },
    { head: "Latency or loss", number: true, cell: (row) => (row.loss !== undefined ? `loss ${digits(row.loss)}` : row.gap ? `${duration(row.gap)} (slowest ${duration(row.slowest)})` : "–") },
    { head: "Step", number: true, cell: (row) => row.step ?? "" }]} /><//>`;
}

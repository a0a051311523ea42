// Health: whether the server and its engine work, since when, and what they run on.

import { Bar, Button, Figure, Loading, Notice, Panel, Table, bytes, digits, duration, html, percent, useJson, useState, when } from "../ui.js";
import { get } from "../api.js";

const ENGINE = {
  ready: ["good", "ready"], starting: ["warn", "starting: it loads the model"], waiting: ["warn", "waits for weights that cannot be read"],
  silent: ["bad", "silent: it hangs, or is in a very long step"], away: ["bad", "ended; the next one is starting"],
};

export default function Health() {
  const { data, error } = useJson("/web/api/health", 3);
  if (!data) return html`<${Loading} error=${error} />`;
  const { engine, health } = data, [kind, said] = ENGINE[health.engine];
  const processes = Object.entries(data.resident).filter(([, n]) => n);
  const used = data.disk_total - data.disk_free;
  const deaths = Object.values(data.deaths).reduce((sum, n) => sum + n, 0);
  return html`<${Notice} error=${error} />
    <div class="figures">
      <${Figure} name="Server" value=${health.status === "ok" ? "up" : "draining"} note=${`coserve ${data.version}`} />
      <${Figure} name="Up for" value=${data.uptime === null ? duration(data.api_uptime) : duration(data.uptime)} note=${data.uptime !== null && data.uptime - data.api_uptime > 120 ? `API restarted ${duration(data.api_uptime)} ago` : undefined} />
      <${Figure} name="Engine" value=${health.engine} note=${engine && `loaded in ${duration(engine.load_seconds)}`} />
      <${Figure} name="Kills survived" value=${deaths} note=${deaths ? Object.entries(data.deaths).map(([name, n]) => `${n} of the ${name}`).join(", ") : "none since the start"} hint="Processes of this server that ended since it started. Another took their place, and answers and jobs went on." />
      <${Figure} name="Supervisor" value=${health.supervisor} note=${health.supervisor === "ready" ? "restarts what ends" : "nothing is restarted"} />
    </div>
    <div class="grid">
      <${Panel} title="Engine" aside=${html`<span class="badge ${kind}">${said}</span>`}>
        ${engine?.crash && html`<${Notice} kind="warn">The engine before this one ended: ${engine.crash}<//>`}
        ${engine && html`<dl class="facts">
          <dt>Model</dt><dd><bdi>${health.model}</bdi>, ${digits(engine.parameters)} parameters</dd>
          ${engine.bases.length > 1 && html`<dt>Bases</dt><dd>${engine.bases.map((name) => html`<bdi>${name}</bdi> `)}</dd>`}
          <dt>Device</dt><dd>${engine.device}, ${engine.dtype}${engine.quantize !== "none" ? `, ${engine.quantize}` : ""}</dd>
          <dt>Longest sequence</dt><dd>${engine.positions.toLocaleString()} tokens</dd>
          <dt>Room for</dt><dd>${engine.cache_tokens.toLocaleString()} tokens in ${engine.max_running} sequences at once</dd></dl>`}
      <//>
      <${Panel} title="Memory of the processes" aside=${bytes(processes.reduce((sum, [, n]) => sum + n, 0))}>
        <${Bar} label="Memory by process" total=${processes.reduce((sum, [, n]) => sum + n, 0)} format=${bytes} parts=${processes.map(([name, value], at) => ({ name: name === "api" ? "API" : name, value, color: at + 1 }))} />
      <//>
      <${Panel} title="Disk of the state folder" aside=${`${bytes(data.disk_free)} free`}>
        <${Bar} label="Disk" total=${data.disk_total} format=${bytes} parts=${[{ name: "used", value: used, color: 6 }, { name: "kept for jobs", value: Math.min(data.disk_reserve, data.disk_free), color: 2 }]} />
        ${data.disk_free < 2 * data.disk_reserve && html`<${Notice} kind="warn">Little room is left (${percent(data.disk_free / data.disk_total)}): uploads are refused when ${bytes(data.disk_reserve)} are left.<//>`}
      <//>
      ${data.workers.length > 0 && html`<${Panel} title="Workers of the cluster" aside=${`${data.workers.filter((told) => told.startsWith("blocks")).length} of ${data.workers.length} work`}>
        <${Table} label="Workers" rows=${data.workers.map((told, at) => ({ id: at + 1, told }))} columns=${[{ head: "Worker", cell: (row) => row.id }, { head: "Has", wide: true, cell: (row) => row.told }]} /><//>`}
      ${data.replicas.length > 0 && html`<${Panel} title="Servers that share the database"><${Table} label="Servers" rowKey=${(row) => row.name} rows=${data.replicas} columns=${[
        { head: "Server", cell: (row) => html`<span class="mono">${row.name}</span>${row.is_this && html` <span class="badge good">this one</span>`}` },
        { head: "Works on", wide: true, cell: (row) => Object.entries(row.work).map(([kind, n]) => `${n} ${WORK[kind] ?? kind}`).join(", ") || "answers alone" }]} /><//>`}
      <${Doctor} />
    </div>`;
}

const WORK = { job: "jobs", batch: "batches", eval: "evals", response: "responses", tinker: "training runs" };
const LEVELS = { good: ["good", "good"], note: ["", "note"], lacking: ["warn", "lacking"], broken: ["bad", "broken"] };

// What `coserve doctor` finds, asked for by hand: the checks take some seconds of a processor.
function Doctor() {
  const [found, setFound] = useState(null);
  const columns = [
    { head: "What", cell: (row) => row.what }, { head: "Result", cell: (row) => html`<span class="badge ${LEVELS[row.level]?.[0]}">${LEVELS[row.level]?.[1] ?? row.level}</span>` },
    { head: "Here", wide: true, cell: (row) => html`${row.found}${row.advice && html`<br /><small>${row.advice}</small>`}` },
  ];
  return html`<${Panel} title="This machine" class="doctor" aside=${found && `checked ${when(found.checked_at)}`}><div class="stack">
    ${found && html`<${Table} label="Checks of this machine" rowKey=${(row) => row.what} rows=${found.data} columns=${columns} />`}
    <div class="row"><${Button} onClick=${async () => setFound(await get("/web/api/doctor"))}>${found ? "Check again" : "Check this machine"}<//></div>
    <small>These are the checks of <code>coserve doctor</code>, made anew every ten minutes at most. Figures for Prometheus are at <a href="/metrics">/metrics</a>, all endpoints at <a href="/docs">/docs</a>.</small></div><//>`;
}

// Health: whether the server and its engine work, since when, and what they run on.

import { Bar, Figure, Notice, Panel, bytes, digits, duration, html, percent, useJson } from "../ui.js";

const ENGINE = {
  ready: ["good", "ready"], starting: ["warn", "starting: it loads the model"], waiting: ["warn", "waits for weights that cannot be read"],
  silent: ["bad", "silent: it hangs, or is in a very long step"], away: ["bad", "ended; the next one is starting"],
};

export default function Health() {
  const { data, error } = useJson("/web/api/health", 3);
  if (!data) return error ? html`<${Notice} error=${error} />` : html`<p class="empty" aria-busy="true">Loading …</p>`;
  const { engine, health } = data, [kind, said] = ENGINE[health.engine];
  const processes = Object.entries(data.resident).filter(([, n]) => n);
  const used = data.disk_total - data.disk_free;
  return html`<${Notice} error=${error} />
    <div class="figures">
      <${Figure} name="Server" value=${health.status === "ok" ? "up" : "draining"} note=${`coserve ${data.version}`} />
      <${Figure} name="Up for" value=${data.uptime === null ? duration(data.api_uptime) : duration(data.uptime)} note=${data.uptime !== null && data.uptime - data.api_uptime > 120 ? `API restarted ${duration(data.api_uptime)} ago` : undefined} />
      <${Figure} name="Engine" value=${health.engine} note=${engine && `loaded in ${duration(engine.load_seconds)}`} />
      <${Figure} name="Deaths outlived" value=${engine?.deaths ?? 0} note="by answers and jobs" hint="Engines that ended since the API started. Answers and jobs go on in the engine that follows." />
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
      <${Panel} title="This machine"><p>What it can do and what is missing is told by <code>coserve doctor</code>, run where the server runs.</p>
        <p class="empty">Figures for Prometheus are at <a href="/metrics">/metrics</a>, all endpoints at <a href="/docs">/docs</a>.</p><//>
    </div>`;
}

// Jobs: create them from a file, watch them train, compare them, and order the queue.

import { Button, Chart, Empty, Figure, Loading, Name, Notice, Panel, Table, bytes, digits, duration, html, percent, useEffect, useJson, useMemo, usePages, useRef, useState, when } from "../ui.js";
import { get, post, stream } from "../api.js";
import { Confirm, Options, Status, Unseen, chatLink, jobLink, useReload } from "./common.js";
import { NewJob } from "./new-job.js";

const MOST_COMPARED = 4;
const MOST_POINTS = 2000; // of a curve; every other one goes beyond
const JOBS = "/v1/fine_tuning/jobs";

export default function Jobs({ rest }) {
  const [first, ...others] = rest;
  if (first === "compare") return html`<${Compare} ids=${others.slice(0, MOST_COMPARED)} />`;
  if (first === "clone" && others[0]) return html`<${Clone} id=${others[0]} />`;
  return first ? html`<${Job} key=${first} id=${first} />` : html`<${List} />`;
}

const label = (job) => job.user_provided_suffix || job.id;
const reward = (row) => row.valid_reward ?? row.valid_loss ?? null;

// The list

function List() {
  const [status, setStatus] = useState("");
  const [chosen, setChosen] = useState([]);
  const jobs = usePages(`${JOBS}${status ? `?status=${status}` : ""}`, 50);
  const { rows, reload } = jobs;
  useReload(jobs, rows?.some((job) => job.status === "running" || job.status === "queued") ? 2 : 10);
  const choose = (id) => setChosen((all) => (all.includes(id) ? all.filter((one) => one !== id) : [...all, id].slice(-MOST_COMPARED)));
  const columns = [
    { head: html`<${Unseen} text="Compare" />`, cell: (job) => html`<input type="checkbox" aria-label="Compare ${label(job)}" checked=${chosen.includes(job.id)} onChange=${() => choose(job.id)} />` },
    { head: "Job", wide: true, cell: (job) => html`<a href=${jobLink(job.id)}><${Name} text=${label(job)} most=${50} /></a>` },
    { head: html`<${Unseen} text="Chat" />`, cell: (job) => job.fine_tuned_model && html`<a href=${chatLink(job.fine_tuned_model)}>Chat with it</a>` },
    { head: "State", cell: (job) => html`<${Status} job=${job} />` },
    { head: "Progress", cell: (job) => html`<${Progress} job=${job} />` },
    { head: "Left", number: true, cell: (job) => (job.progress?.seconds_left != null ? duration(job.progress.seconds_left) : "") },
    { head: "Method", cell: (job) => job.method.type },
    { head: "From", cell: (job) => html`<${Name} text=${job.model} most=${30} />` },
    { head: "Created", cell: (job) => when(job.created_at) },
  ];
  return html`<${NewJob} />
    <${Queue} jobs=${rows} onMoved=${reload} />
    <${Panel} title="Jobs" aside=${html`<span class="row"><label>State <select onChange=${({ target }) => setStatus(target.value)}>
        <option value="">all</option><${Options} names=${["queued", "running", "paused", "succeeded", "failed", "cancelled"]} chosen=${status} /></select></label>
        ${chosen.length > 1 ? html`<a href="#/jobs/compare/${chosen.map(encodeURIComponent).join("/")}">Compare ${chosen.length} jobs</a>` : html`<span>choose two or more to compare</span>`}</span>`}>
      <${Table} label="Jobs" columns=${columns} ...${jobs} empty=${status ? "No job is in this state." : "No jobs yet. Drop a file above to make the first."} /><//>`;
}

function Progress({ job }) {
  const { step, total_steps: total } = job.progress ?? {};
  if (!total) return html`<small>${job.waiting_for ?? ""}</small>`;
  return html`<span class="progress"><progress aria-label="Steps of ${label(job)}" max=${total} value=${step}></progress> <small>${step} of ${total}</small></span>`;
}

// Queued jobs in the order in which they begin.
function Queue({ jobs, onMoved }) {
  const waits = (jobs ?? []).filter((job) => job.status === "queued").map((job) => job.id).join();
  const [queue, setQueue] = useState(null);
  useEffect(() => {
    let gone = false;
    if (waits) get("/v1/fine_tuning/queue").then((found) => { if (!gone) setQueue(found.data); }).catch(() => {});
    else setQueue(null);
    return () => { gone = true; };
  }, [waits]);
  if (!queue?.length) return null;
  const move = async (job, before) => { setQueue((await post(`${JOBS}/${job.id}/move`, { before })).data); onMoved(); };
  const buttons = (job, at) => html`<span class="row">
    <${Button} quiet aria-label="Move ${label(job)} up" disabled=${at === 0} onClick=${() => move(job, queue[at - 1].id)}>↑<//>
    <${Button} quiet aria-label="Move ${label(job)} down" disabled=${at === queue.length - 1} onClick=${() => move(job, queue[at + 2]?.id ?? null)}>↓<//></span>`;
  return html`<${Panel} title="Queue" aside="the first begins next"><${Table} label="Queue" rows=${queue} columns=${[
    { head: "Place", number: true, cell: (job) => queue.indexOf(job) + 1 }, { head: "Job", wide: true, cell: (job) => html`<a href=${jobLink(job.id)}><${Name} text=${label(job)} /></a>` },
    { head: "Waits because it", wide: true, cell: (job) => job.waiting_for ?? "" }, { head: "Order", cell: (job) => buttons(job, queue.indexOf(job)) }]} /><//>`;
}

// One job

// Follows a job, and connects again by itself. Returns { job, checkpoints, steps (figures by step, in order), error }.
function useLive(id) {
  const [seen, setSeen] = useState({ job: null, checkpoints: [], steps: [], error: null });
  const known = useRef(new Map());
  const [round, setRound] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    const take = (told) => {
      for (const row of told.metrics) known.current.set(row.step, row);
      let steps = [...known.current.values()].sort((a, b) => a.step - b.step);
      if (steps.length > MOST_POINTS) {
        steps = steps.filter((_, at) => at % 2 === 0 || at === steps.length - 1);
        known.current = new Map(steps.map((row) => [row.step, row]));
      }
      setSeen({ job: told.job, checkpoints: told.checkpoints, steps, error: null });
      return told.job.status;
    };
    (async () => {
      while (!stop.signal.aborted) {
        let status = null;
        try {
          const after = Math.max(0, ...known.current.keys());
          for await (const told of stream(`${JOBS}/${encodeURIComponent(id)}/live?after_step=${after}`, { signal: stop.signal })) status = take(told);
          if (["succeeded", "failed", "cancelled"].includes(status)) return;
        } catch (error) {
          if (error.name === "AbortError" || error.status === 401) return;
          setSeen((old) => ({ ...old, error }));
          if (error.status === 404) return;
        }
        await new Promise((resolve) => setTimeout(resolve, 1500));
      }
    })();
    return () => stop.abort();
  }, [id, round]);
  return { ...seen, restart: () => setRound((n) => n + 1) };
}

function Job({ id }) {
  const { job, checkpoints, steps, error, restart } = useLive(id);
  const [asks, setAsks] = useState(false);
  if (!job) return html`<${Loading} error=${error} />`;
  const act = (word) => async () => { await post(`${JOBS}/${id}/${word}`, undefined); restart(); };
  const last = steps.at(-1) ?? {}, { step = 0, total_steps: total, seconds_left: left } = job.progress ?? {};
  const recent = steps.slice(-8), seconds = recent.reduce((sum, row) => sum + (row.seconds ?? 0), 0);
  const rate = seconds ? recent.reduce((sum, row) => sum + (row.tokens ?? 0), 0) / seconds : null;
  const isOver = ["succeeded", "failed", "cancelled"].includes(job.status);
  const model = job.fine_tuned_model ?? checkpoints[0]?.fine_tuned_model_checkpoint;
  const best = checkpoints.map((one) => one.metrics.valid_loss).filter((loss) => loss !== undefined);
  return html`<p><a href="#/jobs">All jobs</a></p>
    <div class="head"><h2><${Name} text=${label(job)} /></h2><${Status} job=${job} /><div class="row">
      ${model && html`<a class="button" href=${chatLink(model)}>Chat with it</a>`}
      ${["running", "queued"].includes(job.status) && html`<${Button} quiet onClick=${act("pause")}>Pause<//>`}
      ${job.status === "paused" && !job.stopping && html`<${Button} quiet onClick=${act("resume")}>Resume<//>`}
      ${!isOver && step > 0 && !job.stopping && html`<${Button} quiet onClick=${act("save")}>Stop and save<//>`}
      <a class="button quiet" href="#/jobs/clone/${encodeURIComponent(id)}">Clone</a>
      ${!isOver && html`<${Button} danger onClick=${() => setAsks(true)}>Cancel<//>`}</div></div>
    ${asks && html`<${Confirm} title="Cancel this job?" word="Cancel the job" onYes=${act("cancel")} onClose=${() => setAsks(false)}><p>It ends for good, without an adapter. Its checkpoints stay. To keep what it has learnt, stop and save it instead.</p><//>`}
    <${Notice} error=${error} /><${Notice} error=${job.error} />
    ${job.waiting_for && html`<${Notice} kind="warn">The job ${job.waiting_for}.<//>`}
    <div class="figures">
      <${Figure} kind="trains" name="Step" value=${total ? `${step} of ${total}` : "–"} note=${total ? percent(step / total) : ""} />
      <${Figure} name="Loss" value=${digits(last.train_loss)} note=${steps.length ? `began at ${digits(steps[0].train_loss)}` : ""} />
      <${Figure} name="Validation loss" value=${digits(checkpoints[0]?.metrics.valid_loss)} note=${best.length > 1 ? `best ${digits(Math.min(...best))}` : ""} />
      <${Figure} name="Learning rate" value=${last.learning_rate ? last.learning_rate.toExponential(2) : digits(last.learning_rate)} />
      <${Figure} name="Speed" value="${digits(rate)} tok/s" note="${digits(job.trained_tokens ?? 0)} tokens trained" />
      <${Figure} name=${isOver ? "Ended" : "Time left"} value=${isOver ? new Date(job.finished_at * 1000).toLocaleTimeString() : left == null ? "–" : duration(left)} note=${isOver ? new Date(job.finished_at * 1000).toLocaleDateString() : job.slowdown ? `slows answers ${digits(job.slowdown)}×` : ""} />
    </div>
    <${Curves} steps=${steps} checkpoints=${checkpoints} />
    <div class="grid"><${Checkpoints} checkpoints=${checkpoints} /><${Events} id=${id} status=${job.status} step=${step} /><${Facts} job=${job} /></div>`;
}

function Curves({ steps, checkpoints }) {
  const { x, loss, valid, rate } = useMemo(() => {
    const rows = new Map(steps.map((row) => [row.step, row]));
    const checks = new Map(checkpoints.map((one) => [one.step_number, reward(one.metrics)]));
    const x = [...new Set([0, ...rows.keys(), ...checks.keys()])].sort((a, b) => a - b);
    const of = (field) => x.map((step) => rows.get(step)?.[field] ?? null);
    return { x, loss: of("train_loss"), valid: x.map((step) => checks.get(step) ?? rows.get(step)?.valid_loss ?? null), rate: of("learning_rate") };
  }, [steps, checkpoints]);
  const hasValid = valid.some((one) => one !== null);
  return html`<${Panel} title="Loss by step">
    ${steps.length ? html`<${Chart} label="Training loss, validation and learning rate by step" time=${false} height=${260} x=${x} series=${[
      { name: "training", values: loss, color: 2 }, ...(hasValid ? [{ name: "validation", values: valid, color: 1, points: true }] : []),
      { name: "learning rate", values: rate, color: 6, scale: "rate", format: (n) => (n ? n.toExponential(1) : "0") }]} />` : html`<${Empty}>The first step has not ended yet.<//>`}<//>`;
}

const Checkpoints = ({ checkpoints }) => html`<${Panel} title="Checkpoints"><${Table} label="Checkpoints" rows=${checkpoints.slice(0, 30)} empty="None yet. Each can be asked at once, while the job trains." columns=${[
  { head: "Step", number: true, cell: (one) => one.step_number }, { head: "Loss", number: true, cell: (one) => digits(one.metrics.train_loss) },
  { head: "Validation", number: true, cell: (one) => digits(reward(one.metrics)) }, { head: html`<${Unseen} text="Chat" />`, cell: (one) => html`<a href=${chatLink(one.fine_tuned_model_checkpoint)}>Chat with it</a>` }]} /><//>`;

function Events({ id, status, step }) {
  const { data, error, reload } = useJson(`${JOBS}/${id}/events?limit=100`);
  useEffect(reload, [status, Math.floor(step / 20)]);
  const told = (data?.data ?? []).filter((one) => one.type === "message").slice(0, 12);
  return html`<${Panel} title="Events"><${Notice} error=${error} /><ul class="events">${told.map((one) => html`<li key=${one.id} class=${one.level}><small>${when(one.created_at)}</small> <bdi>${one.message}</bdi></li>`)}</ul><//>`;
}

function Facts({ job }) {
  const { data } = useJson(`${JOBS}/${job.id}/configuration`);
  const rows = Object.entries(data ? flat(data) : {}).map(([name, value]) => ({ id: name, name, value }));
  return html`<${Panel} title="Configuration" aside=${html`<span class="mono">${job.id}</span>`}><details><summary>Every setting as it was chosen</summary>
    <${Table} label="Settings" rows=${rows} empty="Loading …" columns=${[{ head: "Setting", cell: (row) => html`<code>${row.name}</code>` }, { head: "Value", wide: true, cell: (row) => html`<${Name} text=${shown(row.value)} />` }]} /></details>
    <dl class="facts"><dt>From</dt><dd><${Name} text=${job.model} /></dd><dt>Data</dt><dd><${File} id=${job.training_file} /></dd>
      ${job.validation_file && html`<dt>Validation</dt><dd><${File} id=${job.validation_file} /></dd>`}
      ${job.examples && html`<dt>Examples</dt><dd>${job.examples.trained} trained${["truncated", "skipped", "dropped"].filter((name) => job.examples[name]).map((name) => `, ${job.examples[name]} ${name}`)}</dd>`}
      ${job.fine_tuned_model && html`<dt>Adapter</dt><dd><a href="#/adapters/${encodeURIComponent(job.fine_tuned_model)}"><${Name} text=${job.fine_tuned_model} /></a></dd>`}</dl><//>`;
}

function File({ id }) {
  const { data } = useJson(`/v1/files/${encodeURIComponent(id)}`);
  return data ? html`<a href="/v1/files/${encodeURIComponent(id)}/content" download><${Name} text=${data.filename} /></a> <small>${bytes(data.bytes)}</small>` : html`<span class="mono">${id}</span>`;
}

// A settings object with its leaves by their dotted names.
function flat(value, name = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return { [name]: value };
  return Object.assign({}, ...Object.entries(value).map(([key, inner]) => flat(inner, name ? `${name}.${key}` : key)));
}
const shown = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

function Clone({ id }) {
  const { data, error } = useJson(`${JOBS}/${encodeURIComponent(id)}/configuration`);
  if (!data) return html`<${Loading} error=${error} />`;
  return html`<p><a href=${jobLink(id)}>The job that is cloned</a></p><${NewJob} from=${data} />`;
}

// Several jobs, one curve each, and the settings in which they differ.
function Compare({ ids }) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    let gone = false, timer;
    const load = async () => {
      try {
        const jobs = await Promise.all(ids.map(async (id) => {
          const at = `${JOBS}/${encodeURIComponent(id)}`;
          const [job, settings, steps, checks] = await Promise.all([get(at), get(`${at}/configuration`), get(`${at}/metrics?limit=600`), get(`${at}/checkpoints?limit=100`)]);
          return { job, settings: flat(settings), steps: steps.data, checks: checks.data };
        }));
        if (gone) return;
        setFound(jobs); setError(null);
        if (jobs.some(({ job }) => job.status === "running" || job.status === "queued")) timer = setTimeout(load, 3000);
      } catch (problem) { if (!gone) setError(problem); }
    };
    load();
    return () => { gone = true; clearTimeout(timer); };
  }, [ids.join("/")]);
  if (!found) return html`<${Loading} error=${error} />`;
  const x = [...new Set(found.flatMap(({ steps, checks }) => [...steps.map((row) => row.step), ...checks.map((one) => one.step_number)]))].sort((a, b) => a - b);
  const series = found.flatMap(({ job, steps, checks }, at) => {
    const rows = new Map(steps.map((row) => [row.step, row.train_loss])), valid = new Map(checks.map((one) => [one.step_number, one.metrics.valid_loss]));
    const lines = [{ name: label(job), color: at + 1, values: x.map((step) => rows.get(step) ?? null) }];
    return checks.some((one) => one.metrics.valid_loss !== undefined) ? [...lines, { name: `validation of ${label(job)}`, color: at + 1, points: "only", values: x.map((step) => valid.get(step) ?? null) }] : lines;
  });
  const names = [...new Set(found.flatMap(({ settings }) => Object.keys(settings)))].filter((name) => new Set(found.map(({ settings }) => JSON.stringify(settings[name]))).size > 1);
  const rows = [{ id: "state", cells: found.map(({ job }) => job.status) }, { id: "last loss", cells: found.map(({ steps }) => digits(steps.at(-1)?.train_loss)) }, { id: "lowest validation loss", cells: found.map(({ checks }) => digits(Math.min(...checks.map((one) => one.metrics.valid_loss ?? Infinity)))).map((one) => (one.includes("Inf") ? "–" : one)) },
    ...names.map((name) => ({ id: name, cells: found.map(({ settings }) => shown(settings[name])) }))];
  return html`<p><a href="#/jobs">All jobs</a></p><${Notice} error=${error} />
    <${Panel} title="Loss by step">${x.length ? html`<${Chart} label="Loss of ${found.length} jobs by step" time=${false} height=${300} x=${x} series=${series} />` : html`<${Empty}>None of them has made a step.<//>`}<//>
    <${Panel} title="What differs"><${Table} label="What differs" rows=${rows} empty="" columns=${[{ head: "Setting", cell: (row) => html`<code>${row.id}</code>` },
      ...found.map(({ job }, at) => ({ head: html`<a href=${jobLink(job.id)}><${Name} text=${label(job)} most=${24} /></a>`, wide: true, cell: (row) => html`<${Name} text=${row.cells[at]} />` }))]} /><//>`;
}

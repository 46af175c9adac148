// What is wrong, with the evidence and what to do; then the processes.
import { Chip, Table, html } from "./parts.js";
import { age, bytes, count, long, name, rate, time } from "./format.js";

// The parts of a text between backquotes are commands.
const commands = (text) => long(text).split("`").map((part, at) => (at % 2 ? html`<code>${part}</code>` : part));

export const Findings = ({ findings, more }) => html`
  ${findings.length > 0 && html`<ul class="findings" aria-label="Findings">${findings.map(
    (each) => html`<li class=${each.severity}><b>${each.severity}: ${name(each.title)}</b><span>${long(each.evidence)}</span><span class="fix">To do: ${commands(each.fix)}</span>${each.found_by === "doctor" && html`<small>found by epp doctor</small>`}</li>`,
  )}</ul>`}
  ${more > 0 && html`<p><a href="#health">${more} more</a></p>`}`;

const WORKERS = [
  { title: "Worker", left: true, cell: (w) => w.worker },
  { title: "State", left: true, cell: (w) => html`<${Chip} state=${w.state} />` },
  { title: "Heartbeat", cell: (w) => age(w.heartbeat_age_s), note: "time since its event loop turned last" },
  { title: "Late", cell: (w) => time(w.loop_lag_s), note: "how late its event loop is" },
  { title: "Starts", cell: (w) => w.starts },
  { title: "Streams", cell: (w) => count(w.streams) },
  { title: "Requests/s", cell: (w) => rate(w.requests_per_s) },
];
const PROCESSES = [
  { title: "Process", left: true, cell: (p) => p.name },
  { title: "Memory", cell: (p) => bytes(p.memory_bytes) },
  { title: "CPU time", cell: (p) => age(p.cpu_s) },
  { title: "Ends", left: true, cell: (p) => Object.entries(p.exits ?? {}).map(([cause, n]) => `${n} by ${cause}`).join(", ") || "none" },
];
const COUNTERS = [
  ["scrapes_total", "metrics pages scraped"], ["scrapes_skipped_total", "scrapes skipped: the one before had not ended"],
  ["datalayer_poll_errors_total", "metrics pages that could not be fetched"], ["datalayer_extract_errors_total", "metrics pages that could not be read"],
  ["endpoint_ejections_total", "endpoints ejected"], ["bus_drops_total", "updates of the prefix index dropped"],
  ["producer_failures_total", "failures of data producers"], ["violations_total", "streams that broke the protocol"],
  ["deadly_requests_total", "requests refused because they had crashed workers"], ["metrics_port_abuse_total", "clients of this port disconnected"],
  ["shared_memory_overwritten_total", "repairs of shared memory"],
];

// What `epp doctor` has checked beyond the picker itself.
const Doctor = ({ report, now }) => report
  ? html`<p><code>epp doctor</code> checked ${Object.entries(report.checked).map(([check, at]) => `${name(check)} ${age(Math.max(0, now - at))} ago`).join(", ")}.</p>`
  : html`<p>The picker cannot see its gateway's configuration, certificates and rights: <code>epp doctor --gateway-admin HOST:PORT</code> checks them, and what it finds appears here.</p>`;

export function Health({ state }) {
  const processes = Object.entries(state.processes ?? {}).map(([process, use]) => ({ name: process, ...use }));
  const errors = Object.entries(state.errors ?? {}).map(([code, requests]) => ({ code, requests }));
  const index = state.index;
  return html`
    <h2>Findings</h2>
    ${state.findings.length ? html`<${Findings} findings=${state.findings} />` : html`<p class="good">Nothing is wrong, as far as the picker can see.</p>`}
    <${Doctor} report=${state.doctor} now=${state.at} />
    <${Table} caption="Workers" columns=${WORKERS} rows=${state.workers} rowKey=${(w) => w.worker} />
    <${Table} caption="Processes" columns=${PROCESSES} rows=${processes} rowKey=${(p) => p.name} />
    <h2>Prefix index</h2>
    <p>${index.estimated ? "About " : ""}${count(index.used)} of ${count(index.entries)} entries in use, ${count(index.owners_live)} endpoints,
      ${" "}${count(index.evictions)} evictions, ${count(index.dropped)} entries dropped.</p>
    <${Table} caption="Failed requests since the start" columns=${[
      { title: "Error code", left: true, cell: (e) => name(e.code) },
      { title: "Requests", cell: (e) => count(e.requests) },
    ]} rows=${errors} rowKey=${(e) => e.code} empty="No request has failed since the start." />
    <${Table} caption="Counted since the start" columns=${[
      { title: "What", left: true, cell: ([, text]) => text },
      { title: "Count", cell: ([counter]) => count(state.counters[counter]) },
    ]} rows=${COUNTERS} rowKey=${([counter]) => counter} />`;
}

// Is the picker healthy, and how much does it do? Figures of this second, and plots of the last 15 minutes.
import { useEffect, useState } from "./vendor/hooks.mjs";
import { Card, Cards, Plot, Table, html } from "./parts.js";
import { json } from "./store.js";
import { age, count, name, rate, share, time } from "./format.js";
import { Findings } from "./health.js";

const REFRESH_S = 15;
const SPAN_S = 900;
const ADDED = {
  requests_per_s: (s) => s.requests.per_s,
  errors_per_s: (s) => s.requests.errors_per_s,
  first_token_p50_s: (s) => s.requests.first_token_p50_s,
  first_token_p95_s: (s) => s.requests.first_token_p95_s,
  processing_p99_s: (s) => s.requests.processing_p99_s,
  in_flight: (s) => s.requests.in_flight,
  queued: (s) => waiting(s),
};
const waiting = (state) => (state.bands ?? []).reduce((sum, band) => sum + band.requests, 0);
const sum = (state, column) => Object.values(state.endpoints).reduce((total, each) => total + (each.scraped[column] ?? 0), 0);

// The history comes from the picker at first and then now and again; in between, each frame adds its figures. That of one pool of
// several has a sample in some seconds: between them, nothing is added.
export function useHistory(state) {
  const only = state.only;
  const [history, setHistory] = useState(null);
  useEffect(() => {
    let gone = false;
    const path = only === undefined ? "debug/state/history" : `debug/state/history?pool=${encodeURIComponent(only)}`;
    setHistory(null);
    const load = () => json(path).then((found) => !gone && setHistory({ at: Date.now(), ...found }), () => {});
    load();
    const timer = setInterval(load, REFRESH_S * 1e3);
    return () => {
      gone = true;
      clearInterval(timer);
    };
  }, [only]);
  useEffect(() => {
    if (history === null || only !== undefined) return;
    const passed = (Date.now() - history.at) / 1e3;
    const ages = [...history.ages_s.map((each) => each + passed), 0].filter((each) => each <= SPAN_S);
    const figures = {};
    for (const [name, values] of Object.entries(history.figures)) {
      const added = name in ADDED ? ADDED[name](state) ?? null : values[values.length - 1];
      figures[name] = [...values, added].slice(-ages.length);
    }
    setHistory({ at: Date.now(), ages_s: ages, figures });
  }, [state.number]);
  return history;
}

const USED = [
  { title: "Tenant", left: true, value: (t) => t.tenant, cell: (t) => name(t.tenant) },
  { title: "Requests", value: (t) => t.hour.requests, cell: (t) => count(t.hour.requests) },
  { title: "Prompt tokens", value: (t) => t.hour.input_tokens, cell: (t) => count(t.hour.input_tokens) },
  { title: "From cache", value: (t) => t.hour.cached_tokens, cell: (t) => count(t.hour.cached_tokens) },
  { title: "Output tokens", value: (t) => t.hour.output_tokens, cell: (t) => count(t.hour.output_tokens) },
  { title: "Waited", value: (t) => t.hour.waited, cell: (t) => count(t.hour.waited) },
  { title: "Over budget", value: (t) => t.hour.over_budget, cell: (t) => count(t.hour.over_budget) },
  { title: "Refused", value: (t) => t.hour.refused, cell: (t) => count(t.hour.refused) },
  { title: "Tokens in 24 hours", value: (t) => t.day.input_tokens + t.day.output_tokens, cell: (t) => count(t.day.input_tokens + t.day.output_tokens) },
];

export function Overview({ state, theme }) {
  const history = useHistory(state);
  // A pool may have few requests: what the last second had none of is that of the last sample with some.
  const last = (figure) => history?.figures[figure]?.findLast((each) => each !== null);
  const older = ["first_token_p50_s", "first_token_p95_s", "predicted_share", "reported_share"];
  const requests = state.only === undefined ? state.requests : { ...state.requests };
  if (state.only !== undefined) for (const each of older) requests[each] ??= last(each);
  const endpoints = Object.values(state.endpoints);
  const fresh = endpoints.filter((each) => each.state === "fresh").length;
  const wanted = state.workers.filter((worker) => worker.state !== "removed").length;
  const plots = history && [
    ["Requests per second", [["requests", "requests_per_s", "--one", rate], ["errors", "errors_per_s", "--bad", rate]]],
    ["Time to first token", [["median", "first_token_p50_s", "--one", time], ["95th percentile", "first_token_p95_s", "--two", time]]],
    ["Requests at the servers", [["running", "running", "--one", count], ["waiting", "waiting", "--two", count]]],
    ["Prompt tokens from cache", [["predicted", "predicted_share", "--two", share], ["reported", "reported_share", "--one", share]]],
    ["KV cache in use, mean", [["in use", "kv_cache_usage", "--one", share]]],
    ...(state.only === undefined ? [["Picker: processing, 99th percentile", [["time", "processing_p99_s", "--one", time]]]] : []),
    ...(state.flow_control ? [["Waiting in the picker", [["requests", "queued", "--two", count]]]] : []),
  ];
  return html`
    <${Findings} findings=${state.findings.slice(0, 3)} more=${state.findings.length - 3} />
    <${Cards}>
      <${Card} title="Requests" value=${`${rate(requests.per_s)}/s`} note=${`${count(requests.in_flight)} in flight`} />
      <${Card} title="Errors" value=${`${rate(requests.errors_per_s)}/s`} bad=${requests.errors_per_s > 0} note="refused or failed here" />
      <${Card} title="First token" value=${time(requests.first_token_p50_s)} note=${`95 %: ${time(requests.first_token_p95_s)}`} />
      <${Card} title="From cache" value=${share(requests.reported_share)} note=${`predicted ${share(requests.predicted_share)}`} />
      <${Card} title="Endpoints" value=${`${fresh} of ${endpoints.length}`} bad=${fresh < endpoints.length} note="fresh" />
      <${Card} title="Waiting at servers" value=${count(sum(state, "waiting_requests"))} note=${`${count(sum(state, "running_requests"))} running`} />
      ${state.bands && html`<${Card} title="Waiting here" value=${count(waiting(state))} note="in flow control" />`}
      <${Card} title="Workers" value=${`${state.workers_serving} of ${wanted}`} bad=${state.workers_serving < wanted} note=${`supervisor: heartbeat ${age(state.supervisor.heartbeat_age_s)} ago`} />
      ${state.supervisor.replicas_needed !== undefined && html`<${Card} title="Servers needed" value=${count(state.supervisor.replicas_needed)} note=${state.supervisor.headroom === undefined ? "by the scaling signal" : `headroom ${share(state.supervisor.headroom)}`} />`}
      ${state.others && html`<${Card} title="Other replicas" value=${count(state.others.replicas)} bad=${state.others.age_s > 1} note=${`${count(state.others.requests)} requests in flight`} />`}
    <//>
    ${state.tenants && state.only === undefined && html`<${Table} caption="Tenants, last hour" columns=${USED} rows=${state.tenants} rowKey=${(t) => t.tenant} initial=${{ at: 8, down: true }} empty="No tenant has sent a request yet." />`}
    <h2>Last 15 minutes</h2>
    ${plots
      ? html`<div class="plots">${plots.map(
          ([title, series]) => html`<${Plot} key=${title} title=${title} theme=${theme} ages=${history.ages_s}
            series=${series.map(([label, figure, colour, show]) => ({ title: label, values: history.figures[figure], colour, show }))} />`,
        )}</div>`
      : html`<p class="notice">Loading the history …</p>`}`;
}

// Which of several pools are loaded, failing or idle? And the state as the views of one pool show it.
import { Chip, Table, html } from "./parts.js";
import { count, name, rate, time } from "./format.js";

const health = (pool) => (!pool.endpoints || !pool.fresh ? "down" : pool.fresh < pool.endpoints ? "stale" : "fresh");
const COLUMNS = [
  { title: "Pool", left: true, value: (p) => p.name, cell: (p) => html`<a href=${`#pools/${encodeURIComponent(p.name)}`}>${name(p.name)}</a>` },
  { title: "State", left: true, value: (p) => health(p), cell: (p) => html`<${Chip} state=${health(p)} />`, note: "fresh: all endpoints are; stale: some are not; down: none is" },
  { title: "Fresh", value: (p) => p.fresh, cell: (p) => `${count(p.fresh)} of ${count(p.endpoints)}`, note: "endpoints with fresh metrics" },
  { title: "Requests/s", value: (p) => p.requests_per_s, cell: (p) => rate(p.requests_per_s), note: "that got an endpoint" },
  { title: "Errors/s", value: (p) => p.errors_per_s, cell: (p) => rate(p.errors_per_s), note: "in the picker or at a server" },
  { title: "First token", value: (p) => p.first_token_p50_s, cell: (p) => time(p.first_token_p50_s), note: "median of the last second" },
  { title: "In flight", value: (p) => p.in_flight, cell: (p) => count(p.in_flight) },
  { title: "Waiting", value: (p) => p.waiting, cell: (p) => count(p.waiting), note: "at the servers" },
  { title: "Queued", value: (p) => p.queued, cell: (p) => count(p.queued), note: "in flow control" },
  { title: "Configuration", value: (p) => p.configuration?.generation, cell: (p) => (p.configuration ? count(p.configuration.generation) : "none"), note: "the number of the generation in force" },
  { title: "Reload", left: true, value: (p) => (p.configuration?.last_reload_failed ? 1 : 0), cell: (p) => (p.configuration?.last_reload_failed ? "refused" : ""), note: "what became of the last reload" },
  { title: "Findings", value: (p) => p.findings, cell: (p) => count(p.findings) },
];

export function Pools({ state }) {
  const findings = {};
  for (const each of state.findings) if (each.pool !== undefined) findings[each.pool] = (findings[each.pool] ?? 0) + 1;
  const rows = Object.values(state.pools).map((each) => ({ ...each, findings: findings[each.name] ?? 0 }));
  return html`<${Table} caption="Pools" columns=${COLUMNS} rows=${rows} rowKey=${(p) => p.name} initial=${{ at: 0, down: false }} />`;
}

// The state with only what belongs to this pool. `only` is its name. What nobody counts for a pool is unknown.
export function ofPool(state, only) {
  const own = state.pools[only];
  const mine = (rows) => (rows ?? []).filter((each) => each.pool === only);
  return {
    ...state,
    only,
    pool: only,
    requests: {
      per_s: own.requests_per_s,
      errors_per_s: own.errors_per_s,
      in_flight: own.in_flight,
      first_token_p50_s: own.first_token_p50_s,
      first_token_p95_s: own.first_token_p95_s,
    },
    endpoints: Object.fromEntries(Object.entries(state.endpoints).filter(([, each]) => each.pool === only)),
    bands: mine(state.bands),
    flows: mine(state.flows),
    outcomes: mine(state.outcomes),
    findings: mine(state.findings),
    flow_control: own.flow_control,
    configuration: own.configuration,
    settings: state.settings && { ...state.settings, ...state.settings.configurations.find((each) => each.pools.includes(only)) },
  };
}

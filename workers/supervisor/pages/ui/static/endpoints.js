// Which endpoints are loaded, stale or down? A heat map, a table, and the history of one endpoint.
import { useEffect, useMemo, useRef, useState } from "./vendor/hooks.mjs";
import { Chip, Plot, Table, cells, html } from "./parts.js";
import { json } from "./store.js";
import { age, count, name, rate, share, short } from "./format.js";

const HEATS = {
  load: { title: "Load: running and waiting", value: (e) => (e.scraped.running_requests ?? 0) + (e.scraped.waiting_requests ?? 0), show: count },
  kv: { title: "KV cache in use", value: (e) => e.scraped.kv_cache_usage, show: share, most: 1 },
  share: { title: "Share of picks", value: (e) => e.traffic_share, show: share },
  cached: { title: "Prompt tokens from cache", value: (e) => e.reported_share, show: share, most: 1 },
};
const BAD = ["down", "ejected"];
const COLUMNS = [
  { title: "Endpoint", left: true, value: (e) => e.name, cell: (e) => html`<a href=${`#endpoints/${encodeURIComponent(e.id)}`} title=${name(e.name)}>${short(e.name)}</a>` },
  { title: "State", left: true, value: (e) => e.state, cell: (e) => html`<${Chip} state=${e.state} />` },
  { title: "Age", value: (e) => e.age_s, cell: (e) => age(e.age_s), note: "time since the last good scrape" },
  { title: "Running", value: (e) => e.scraped.running_requests, cell: (e) => count(e.scraped.running_requests) },
  { title: "Waiting", value: (e) => e.scraped.waiting_requests, cell: (e) => count(e.scraped.waiting_requests) },
  { title: "KV", value: (e) => e.scraped.kv_cache_usage, cell: (e) => share(e.scraped.kv_cache_usage), note: "share of the KV cache in use" },
  { title: "In flight", value: (e) => e.in_flight, cell: (e) => count(e.in_flight), note: "sent by the picker and not ended" },
  { title: "Picks/s", value: (e) => e.picks_per_s, cell: (e) => rate(e.picks_per_s) },
  { title: "Share", value: (e) => e.traffic_share, cell: (e) => share(e.traffic_share), note: "of all picks" },
  { title: "Cached", value: (e) => e.reported_share, cell: (e) => share(e.reported_share), note: "reported share of prompt tokens from the cache" },
  { title: "Predicted", value: (e) => e.predicted_share, cell: (e) => share(e.predicted_share), note: "predicted share of prompt tokens from the cache" },
  { title: "Address", left: true, whole: true, value: (e) => e.address, cell: (e) => name(e.address) },
  { title: "Remarks", left: true, cell: (e) => name(remarks(e)) },
];

const POOL = { title: "Pool", left: true, value: (e) => e.pool, cell: (e) => name(e.pool) };
const remarks = (e) => [e.why, e.first_token && `first token in ${e.first_token}`, e.not_precise && `matched approximately: ${e.not_precise}`].filter(Boolean).join("; ");

export function Endpoints({ state, theme, selected }) {
  const [text, setText] = useState("");
  const [only, setOnly] = useState("all");
  const [heat, setHeat] = useState("load");
  const kept = useRef(new Map());
  const endpoints = useMemo(() => {
    const next = new Map();
    for (const [id, each] of Object.entries(state.endpoints)) {
      const before = kept.current.get(id);
      next.set(id, before?.of === each ? before : { of: each, row: { ...each, id } });
    }
    kept.current = next;
    return [...next.values()].map((each) => each.row);
  }, [state.endpoints]);
  const states = [...new Set(endpoints.map((each) => each.state))].sort();
  const shown = endpoints.filter((e) => (only === "all" || e.state === only) && (e.name + e.address).toLowerCase().includes(text.toLowerCase()));
  const all = state.pools && state.only === undefined ? [COLUMNS[0], POOL, ...COLUMNS.slice(1)] : COLUMNS;
  const one = endpoints.find((each) => each.id === selected);
  return html`
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label>Name or address <input type="search" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <label>State <select value=${only} onChange=${(event) => setOnly(event.target.value)}>
        <option value="all">all</option>${states.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>
      <label>Heat map <select value=${heat} onChange=${(event) => setHeat(event.target.value)}>
        ${Object.entries(HEATS).map(([key, each]) => html`<option value=${key}>${each.title}</option>`)}</select></label>
    </form>
    <${HeatMap} endpoints=${shown} heat=${HEATS[heat]} theme=${theme} />
    ${one && html`<${One} key=${one.id} endpoint=${one} theme=${theme} number=${state.number} />`}
    <${Table} caption="Endpoints" columns=${endpoints.some(remarks) ? all : all.slice(0, -1)} rows=${shown} rowKey=${(e) => e.id} Row=${Row} initial=${{ at: 0, down: false }}
      empty=${endpoints.length ? "No endpoint matches the filter." : "The pool has no endpoints."} />`;
}

const Row = ({ row, columns }) => useMemo(() => html`<tr>${cells(columns, row)}</tr>`, [row, columns.length]);

const CELL = 22;

function HeatMap({ endpoints, heat, theme }) {
  const canvas = useRef(null);
  const [width, setWidth] = useState(600);
  const [over, setOver] = useState("");
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(entry.contentRect.width));
    observer.observe(canvas.current.parentElement);
    return () => observer.disconnect();
  }, []);
  const across = Math.max(1, Math.floor(width / CELL));
  const rows = Math.max(1, Math.ceil(endpoints.length / across));
  const most = heat.most ?? Math.max(1e-9, ...endpoints.map((e) => heat.value(e) ?? 0));
  useEffect(() => {
    const scale = devicePixelRatio || 1;
    const area = canvas.current;
    area.width = across * CELL * scale;
    area.height = rows * CELL * scale;
    area.style.width = `${across * CELL}px`;
    area.style.height = `${rows * CELL}px`;
    const draw = area.getContext("2d");
    draw.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const bad = style.getPropertyValue("--bad");
    endpoints.forEach((e, at) => {
      const [x, y] = [(at % across) * CELL, Math.floor(at / across) * CELL];
      const value = heat.value(e);
      draw.globalAlpha = 1;
      draw.fillStyle = style.getPropertyValue("--line");
      draw.fillRect(x + 1, y + 1, CELL - 3, CELL - 3);
      draw.globalAlpha = value === undefined ? 0 : 0.1 + 0.9 * Math.min(1, value / most);
      draw.fillStyle = BAD.includes(e.state) ? bad : style.getPropertyValue("--one");
      draw.fillRect(x + 1, y + 1, CELL - 3, CELL - 3);
      if (e.state !== "fresh") {
        draw.globalAlpha = 1;
        draw.strokeStyle = BAD.includes(e.state) ? bad : style.getPropertyValue("--warn");
        draw.lineWidth = 2;
        draw.strokeRect(x + 2, y + 2, CELL - 5, CELL - 5);
        draw.beginPath();
        draw.moveTo(x + 4, y + 4);
        draw.lineTo(x + CELL - 6, y + CELL - 6);
        draw.stroke();
      }
    });
  });
  const at = (event) => endpoints[Math.floor(event.offsetY / CELL) * across + Math.floor(event.offsetX / CELL)];
  const move = (event) => {
    const e = at(event);
    setOver(e ? `${name(e.name)}: ${heat.show(heat.value(e))}, ${e.state}` : "");
  };
  const open = (event) => {
    const e = at(event);
    if (e) location.hash = `endpoints/${encodeURIComponent(e.id)}`;
  };
  return html`
    <figure>
      <figcaption>${heat.title} <span class="legend">0 to ${heat.show(most)}; struck through: not fresh</span></figcaption>
      <div><canvas ref=${canvas} role="img" aria-label=${`Heat map of ${endpoints.length} endpoints: ${heat.title}. The table below has the same figures.`}
        onMouseMove=${move} onMouseLeave=${() => setOver("")} onClick=${open}></canvas></div>
      <p class="over" aria-hidden="true">${over || " "}</p>
    </figure>`;
}

function One({ endpoint, theme, number }) {
  const [history, setHistory] = useState(null);
  useEffect(() => {
    let gone = false;
    json(`debug/state/history?endpoint=${encodeURIComponent(endpoint.id)}`).then((found) => !gone && setHistory(found), () => {});
    return () => {
      gone = true;
    };
  }, [endpoint.id, Math.floor(number / 10)]);
  const plots = [
    ["Requests", [["running", "running", "--one", count], ["waiting", "waiting", "--two", count], ["in flight", "in_flight", "--three", count]]],
    ["KV cache in use", [["in use", "kv_cache_usage", "--one", share]]],
  ];
  return html`
    <section class="panel" aria-label="Selected endpoint">
      <h2>${short(endpoint.name)} <${Chip} state=${endpoint.state} /> <a href="#endpoints">Close</a></h2>
      <p>${name(endpoint.address)}, namespace ${name(endpoint.namespace)}; last good scrape ${age(endpoint.age_s)} ago; ${count(endpoint.index_entries)} blocks in the prefix index.
        ${" "}${why(endpoint.state)}</p>
      ${endpoint.why && html`<p class="findings"><span class="warning">The last scrape failed: ${name(endpoint.why)}</span></p>`}
      ${endpoint.first_token && html`<p>Learned: first token in ${name(endpoint.first_token)}.</p>`}
      ${endpoint.not_precise && html`<p>Its prefix matches are approximate: ${name(endpoint.not_precise)}.</p>`}
      <dl class="facts">
        <dt>Picks</dt><dd>${rate(endpoint.picks_per_s)}/s, ${share(endpoint.traffic_share)} of all</dd>
        <dt>Prompt tokens from cache</dt><dd>${share(endpoint.reported_share)} reported, ${share(endpoint.predicted_share)} predicted</dd>
        <dt>In flight</dt><dd>${count(endpoint.in_flight)} requests, ${count(endpoint.tokens_in_flight)} tokens</dd>
        ${Object.entries(endpoint.scraped).map(([column, value]) => html`<dt>${name(column.replaceAll("_", " "))}</dt><dd>${column.endsWith("_usage") ? share(value) : count(value)}</dd>`)}
      </dl>
      ${history && html`<div class="plots">${plots.map(([title, series]) => html`<${Plot} key=${title} title=${title} theme=${theme} ages=${history.ages_s}
        series=${series.map(([label, figure, colour, show]) => ({ title: label, values: history.figures[figure], colour, show }))} />`)}</div>`}
    </section>`;
}

const why = (state) =>
  ({
    down: "Down: the server refused connections twice.",
    ejected: "Ejected: its requests failed, so it gets none for a while.",
    "on trial": "On trial: one request tries whether it works again.",
    failing: "Failing: it fails more of its requests than the others, so its failed answers count as load.",
    stale: "Stale: the last good scrape is too old, so the picker estimates the load.",
    unknown: "Unknown: no scrape has succeeded yet.",
    draining: "Draining: the endpoint leaves and gets no new requests.",
  })[state] ?? "";

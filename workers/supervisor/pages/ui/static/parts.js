// What several views use: html templates, tables that can be sorted, cards with figures, plots.
import { h } from "./vendor/preact.mjs";
import { useEffect, useRef, useState } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";
import { UNKNOWN, share } from "./format.js";

export const html = htm.bind(h);
const ROWS = 100;
const SHARE_TOP = 0.05; // the least top of a plot of shares
const SPAN_MIN = 15;
const SHORTEST_MIN = 2; // a young history does not begin as a stroke at the edge

export const Card = ({ title, value, note, bad }) => html`
  <div class=${bad ? "card bad" : "card"}>
    <dt>${title}</dt>
    <dd>${value}${note && html`<small>${note}</small>`}</dd>
  </div>`;

export const Cards = ({ children }) => html`<dl class="cards">${children}</dl>`;

export const Chip = ({ state }) => html`<span class=${`chip ${state.replace(/ /g, "-")}`}>${state}</span>`;

// A table. `columns`: {title, cell(row), value(row) to sort by, left, whole (not broken), note}. Shows ROWS rows, and more on demand.
export function Table({ caption, columns, rows, rowKey, empty, Row, initial }) {
  const [order, setOrder] = useState(initial ?? { at: -1, down: true });
  const [limit, setLimit] = useState(ROWS);
  if (!rows.length) return html`<p class="empty">${empty ?? `No ${caption.toLowerCase()}.`}</p>`;
  const value = columns[order.at]?.value;
  const sorted = value ? [...rows].sort((a, b) => compare(value(a), value(b)) * (order.down ? -1 : 1)) : rows;
  const shown = sorted.slice(0, limit);
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label=${caption}>
      <table>
        <caption>${caption}</caption>
        <thead><tr>${columns.map(
          (column, at) => html`<th scope="col" class=${column.left ? "left" : ""} title=${column.note}
              aria-sort=${order.at === at ? (order.down ? "descending" : "ascending") : undefined}>
            ${column.value
              ? html`<button type="button" onClick=${() => setOrder({ at, down: order.at === at ? !order.down : !column.left })}>
                  ${column.title}<span aria-hidden="true">${order.at === at ? (order.down ? " ▾" : " ▴") : ""}</span></button>`
              : column.title}
          </th>`,
        )}</tr></thead>
        <tbody>${shown.map((row) => (Row ? html`<${Row} key=${rowKey(row)} row=${row} columns=${columns} />` : html`<tr key=${rowKey(row)}>${cells(columns, row)}</tr>`))}</tbody>
      </table>
    </div>
    ${sorted.length > limit && html`<p><button type="button" onClick=${() => setLimit(limit + 5 * ROWS)}>Show more</button> ${limit} of ${sorted.length} rows</p>`}`;
}

export const cells = (columns, row) =>
  columns.map((column, at) =>
    at === 0
      ? html`<th scope="row" class=${column.whole ? "left whole" : "left"}>${column.cell(row)}</th>`
      : html`<td class=${column.left ? (column.whole ? "left whole" : "left") : ""}>${column.cell(row)}</td>`,
  );

function compare(a, b) {
  const first = a ?? -Infinity;
  const second = b ?? -Infinity;
  if (typeof first === "string" && typeof second === "string") return first.localeCompare(second, undefined, { numeric: true });
  return first < second ? -1 : first > second ? 1 : 0;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A plot of the last minutes. `series`: {title, values, colour, show(value)}; `ages`: seconds ago, oldest first.
export function Plot({ title, ages, series, theme }) {
  const place = useRef(null);
  const plot = useRef(null);
  const data = [ages.map((each) => -each / 60), ...series.map((each) => each.values)];
  useEffect(() => {
    const show = series[0].show;
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", labelFont: "11px system-ui" };
    plot.current = new uPlot(
      {
        width: place.current.clientWidth || 300,
        height: 132,
        legend: { show: false },
        cursor: { y: false, points: { size: 6 } },
        scales: { x: { time: false, range: (_, oldest) => [Math.max(-SPAN_MIN, Math.min(-SHORTEST_MIN, Math.floor(oldest ?? 0))), 0] }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(show === share ? SHARE_TOP : 0, high > 0 ? high * 1.1 : 1)] } },
        axes: [
          { ...axis, space: 60, size: 24, values: (_, ticks) => ticks.map((tick) => (tick ? `${tick} min` : "now")) },
          { ...axis, size: 58, space: 32, values: (_, ticks) => ticks.map((tick) => show(tick)) },
        ],
        series: [{}, ...series.map((each) => ({ label: each.title, stroke: colour(each.colour), width: 1.5, spanGaps: true, points: { show: false } }))],
      },
      data,
      place.current,
    );
    const observer = new ResizeObserver(([entry]) => plot.current?.setSize({ width: Math.floor(entry.contentRect.width), height: 132 }));
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [theme, series.length]);
  useEffect(() => plot.current?.setData(data), [ages]);
  const latest = (each) => {
    const known = each.values.filter((value) => value !== null && value !== undefined);
    return known.length ? each.show(known[known.length - 1]) : UNKNOWN;
  };
  const spoken = series.map((each) => `${each.title}: now ${latest(each)}, at most ${each.values.some((v) => v !== null) ? each.show(Math.max(...each.values.filter((v) => v !== null))) : UNKNOWN}`);
  return html`
    <figure>
      <figcaption>${title}
        <span class="legend">${series.map((each) => html`<span class="key"><i class=${each.colour.slice(2)} aria-hidden="true"></i>${each.title} <b>${latest(each)}</b></span>`)}</span>
      </figcaption>
      <div class="plot" ref=${place} role="img" aria-label=${`${title}, last 15 minutes. ${spoken.join(". ")}`}></div>
    </figure>`;
}

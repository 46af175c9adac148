// What waits in the picker, why, and what was refused.
import { Card, Cards, Table, html } from "./parts.js";
import { age, bytes, count, name, share, time } from "./format.js";

const OUTCOMES = {
  Dispatched: "sent to an endpoint",
  RejectedCapacity: "refused: the queue was full",
  RejectedNoEndpoints: "refused: no endpoint",
  RejectedOther: "refused for another reason",
  EvictedTTL: "waited longer than its time to live",
  EvictedContextCancelled: "the client left while it waited",
  EvictedDisplaced: "gave its place to a more important request",
  EvictedOther: "left the queue for another reason",
};

export function FlowControl({ state }) {
  const flow = state.flow_control;
  const limit = (band) => flow.bands_max[band.priority] ?? flow.band_default;
  const waiting = state.bands.reduce((sum, band) => sum + band.requests, 0);
  const bands = [
    { title: "Priority", left: true, value: (b) => b.priority, cell: (b) => b.priority },
    { title: "Waiting", value: (b) => b.requests, cell: (b) => count(b.requests) },
    { title: "Limit", cell: (b) => count(limit(b).requests) },
    { title: "Bytes", value: (b) => b.bytes, cell: (b) => bytes(b.bytes) },
    { title: "Limit of bytes", cell: (b) => bytes(limit(b).bytes) },
    { title: "Oldest", value: (b) => b.oldest_age_s, cell: (b) => age(b.oldest_age_s) },
  ];
  const flows = [
    { title: "Flow", left: true, value: (f) => f.fairness_id, cell: (f) => name(f.fairness_id) },
    { title: "Priority", value: (f) => f.priority, cell: (f) => f.priority },
    { title: "Waiting", value: (f) => f.requests, cell: (f) => count(f.requests) },
    { title: "Share", value: (f) => f.requests, cell: (f) => share(waiting ? f.requests / waiting : undefined) },
    { title: "Bytes", value: (f) => f.bytes, cell: (f) => bytes(f.bytes) },
  ];
  const outcomes = [
    { title: "Outcome", left: true, whole: true, value: (o) => o.outcome, cell: (o) => name(o.outcome) },
    { title: "Meaning", left: true, cell: (o) => OUTCOMES[o.outcome] ?? "" },
    { title: "Priority", value: (o) => o.priority, cell: (o) => o.priority },
    { title: "Requests", value: (o) => o.requests, cell: (o) => count(o.requests) },
  ];
  const full = flow.saturation.effective >= 1;
  return html`
    <${Cards}>
      <${Card} title="Saturation" value=${share(flow.saturation.effective)} bad=${full} note=${full ? "full: requests wait" : `by ${name(flow.detector)}`} />
      <${Card} title="Waiting" value=${count(waiting)} note=${flow.requests_max ? `limit ${count(flow.requests_max)}` : "no limit but the bands'"} />
      <${Card} title="Bytes waiting" value=${bytes(state.bands.reduce((sum, band) => sum + band.bytes, 0))} note=${flow.bytes_max ? `limit ${bytes(flow.bytes_max)}` : "no limit but the bands'"} />
      <${Card} title="Time in flow control" value=${time(state.requests.waited_p50_s)} note=${`95 %: ${time(state.requests.waited_p95_s)}`} />
    <//>
    <${Table} caption="Bands" columns=${bands} rows=${state.bands} rowKey=${(b) => b.priority} />
    <${Table} caption="Flows with waiting requests" columns=${flows} rows=${state.flows} rowKey=${(f) => `${f.priority} ${f.fairness_id}`} initial=${{ at: 2, down: true }} empty="No request waits." />
    <${Table} caption="How requests left flow control, since the start" columns=${outcomes} rows=${state.outcomes} rowKey=${(o) => `${o.priority} ${o.outcome}`} empty="No request has come yet." />`;
}

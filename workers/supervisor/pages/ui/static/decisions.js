// Did this request go to the right place? The latest decisions; for one of them, what each filter and scorer did.
// Addresses: #decisions, #decisions/id/REQUEST_ID, #decisions/RECEIPT.
import { useEffect, useState } from "./vendor/hooks.mjs";
import { Chip, Table, html } from "./parts.js";
import { json } from "./store.js";
import { count, long, name, short, time } from "./format.js";

const EVERY_S = 2;
const SHOWN = 50;
const PARTS = 8; // colours of scorers
const BY_ID = "id/"; // begins the address of a decision
const seen = new Map(); // request id -> decision, of those that the list shows
const SAME = 0.0005; // totals that differ by less show as equal

export function Decisions({ state, selected }) {
  const [decisions, setDecisions] = useState(null);
  const [trouble, setTrouble] = useState("");
  const [one, setOne] = useState(null);
  const [text, setText] = useState("");
  const [only, setOnly] = useState("all");
  const [receipt, setReceipt] = useState("");
  const id = selected.startsWith(BY_ID) ? selected.slice(BY_ID.length) : "";
  const following = one === null && receipt === "" && selected === "";
  useEffect(() => {
    if (!following) return undefined; // so that the picker still remembers the decision for "what if"
    let gone = false;
    const load = () => json(`debug/decisions?n=${SHOWN}${state.only === undefined ? "" : `&pool=${encodeURIComponent(state.only)}`}`).then(
      (found) => {
        if (gone) return;
        seen.clear();
        found.decisions.forEach((d) => seen.set(d.request_id, d));
        setDecisions(found.decisions);
        setTrouble("");
      },
      (error) => !gone && setTrouble(error.message),
    );
    load();
    const timer = setInterval(load, EVERY_S * 1e3);
    return () => {
      gone = true;
      clearInterval(timer);
    };
  }, [following, state.only]);
  if (one) return html`<${One} decision=${one} close=${() => back(() => setOne(null))} />`;
  if (id) return html`<${ById} key=${id} id=${id} />`;
  const opened = receipt || selected;
  if (opened) return html`<${Receipt} key=${opened} id=${opened} open=${setOne} close=${() => (selected ? leave() : back(() => setReceipt("")))} />`;
  if (trouble) return html`<p class="notice" role="alert">No decisions: ${name(trouble)}</p>`;
  if (decisions === null) return html`<p class="notice">Asking the workers …</p>`;
  const found = decisions.filter((d) =>
    (only === "all" || (only === "refused") === (d.refused !== "")) &&
    [d.request_id, d.model, d.target_model, d.flow, ...d.targets].join(" ").toLowerCase().includes(text.toLowerCase()));
  const columns = [
    { title: "Request", left: true, whole: true, cell: (d) => (d.request_id ? html`<a class="link" href=${`#decisions/${BY_ID}${encodeURIComponent(d.request_id)}`}>${short(d.request_id)}</a>`
      : html`<button type="button" class="link" onClick=${() => setOne(d)}>(no id)</button>`) },
    { title: "Sent to", left: true, value: (d) => d.targets[0], cell: (d) => (d.refused ? html`<${Chip} state="refused" /> ${name(d.refused)}` : short(picked(d))) },
    ...(state.pools && state.only === undefined ? [{ title: "Pool", left: true, value: (d) => d.pool, cell: (d) => name(d.pool) }] : []),
    { title: "Flow", left: true, value: (d) => d.flow, cell: (d) => name(d.flow) },
    { title: "Ago", value: (d) => -d.ago_s, cell: (d) => `${d.ago_s.toFixed(1)} s` },
    { title: "Model", left: true, value: (d) => d.model, cell: (d) => name(d.model) },
    { title: "Priority", value: (d) => d.priority, cell: (d) => d.priority },
    { title: "Bytes", value: (d) => d.body_bytes, cell: (d) => count(d.body_bytes) },
    { title: "Runner-up", left: true, value: (d) => primary(d)?.runner_up, cell: (d) => short(primary(d)?.runner_up || "–") },
    { title: "Margin", value: (d) => primary(d)?.margin, cell: (d) => margin(primary(d)), note: "total of the picked endpoint minus that of the runner-up" },
    { title: "Cached", value: (d) => d.cached?.predicted, cell: (d) => cached(d.cached), note: "prompt tokens: predicted, then reported" },
  ];
  return html`
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label>Request, model, flow or address <input type="search" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <label>Outcome <select value=${only} onChange=${(event) => setOnly(event.target.value)}>
        <option value="all">all</option><option value="sent">sent</option><option value="refused">refused</option></select></label>
    </form>
    <form class="filters" onSubmit=${(event) => {
      event.preventDefault();
      setReceipt(event.target.elements.receipt.value.trim());
    }}>
      <label>Receipt <input type="search" name="receipt" autocomplete="off" spellcheck="false" placeholder="x-llm-d-receipt of a response" /></label>
      <button>Open</button>
    </form>
    <${Table} caption="Latest decisions" columns=${columns} rows=${found} rowKey=${(d) => `${d.worker} ${d.request_id} ${d.body_bytes} ${d.targets}`}
      empty=${decisions.length ? "No decision matches the filter." : "No decision yet: send a request."} />`;
}

// The button with the focus goes away with what it closes, so the view takes the focus.
function back(close) {
  close();
  document.getElementById("view")?.focus({ preventScroll: true });
}

function leave() {
  location.hash = "#decisions";
}

// A decision by its address: from the list, or from the workers if they remember it.
function ById({ id }) {
  const [decision, setDecision] = useState(seen.get(id) ?? null);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    if (decision) return;
    json(`debug/decisions?${new URLSearchParams({ request_id: id })}`).then(
      (found) => (found.decisions.length ? setDecision(found.decisions[0]) : setTrouble(`No worker remembers request ${id} any more. The recording may: epp explain --request-id ${id}`)),
      (error) => setTrouble(error.message),
    );
  }, [id]);
  if (decision) return html`<${One} decision=${decision} close=${leave} />`;
  return html`<p><a href="#decisions">Back to the latest decisions</a></p>
    <p class="notice" role=${trouble ? "alert" : "status"}>${trouble ? long(trouble) : "Asking the workers …"}</p>`;
}

// What a receipt says: why a request went to its endpoint, also after the workers have forgotten the decision.
function Receipt({ id, open, close }) {
  const [found, setFound] = useState(null);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    json(`debug/receipt?${new URLSearchParams({ id })}`).then(setFound, (error) => setTrouble(error.message));
    document.getElementById("receipt")?.focus();
  }, [id]);
  const fact = (title, value) => value !== undefined && value !== null && value !== "" && html`<dt>${title}</dt><dd>${value}</dd>`;
  return html`
    <section aria-labelledby="receipt">
      <p><button type="button" onClick=${close}>Back to the latest decisions</button></p>
      <h2 id="receipt" tabindex="-1">Receipt</h2>
      ${trouble && html`<p class="notice" role="alert">${long(trouble)}</p>`}
      ${found && html`<dl class="facts">
        ${fact("Decided", `${new Date(found.at * 1e3).toLocaleString()}, by worker ${found.worker} with configuration ${found.configuration}`)}
        ${fact("Sent to", html`<b>${name(found.target)}</b>`)}
        ${fact("Why", name(found.reason))}
        ${fact("Runner-up", found.runner_up && `${name(found.runner_up)}, ${Math.abs(found.margin) < SAME ? "with the same total" : `${found.margin.toFixed(3)} below`}`)}
        ${fact("Predicted cached tokens", found.cached_tokens === null ? null : count(found.cached_tokens))}
        ${fact("Predicted first token", found.first_token_s === null ? null : time(found.first_token_s))}
      </dl>
      ${found.explanation ? html`<p><button type="button" onClick=${() => open(found.explanation)}>Show the whole decision</button></p>`
        : html`<p class="notice">No worker remembers the decision any more: each keeps its last 32.</p>`}`}
    </section>`;
}

const primary = (d) => d.profiles.find((each) => each.profile === d.primary);
const picked = (d) => primary(d)?.picked[0] ?? d.targets[0];
const margin = (profile) => (profile?.margin === undefined || profile?.margin === null ? "–" : profile.margin.toFixed(3));
const cached = (c) => (c ? `${count(c.predicted)} / ${c.reported === null || c.reported === undefined ? "?" : count(c.reported)}` : "–");

function One({ decision: d, close }) {
  useEffect(() => document.getElementById("decision")?.focus(), []);
  return html`
    <section aria-labelledby="decision">
      <p><button type="button" onClick=${close}>Back to the latest decisions</button></p>
      <h2 id="decision" tabindex="-1">Request ${name(d.request_id || "(no id)")}</h2>
      <p>${d.pool && html`Pool ${name(d.pool)}, `}Model ${name(d.model || "(none)")}${d.target_model !== d.model && html` as ${name(d.target_model)}`}, flow ${name(d.flow)}, priority ${d.priority},
        ${" "}${count(d.body_bytes)} bytes, decided by worker ${d.worker}.</p>
      ${d.refused ? html`<p class="findings"><span class="error"><b>Refused: ${name(d.refused)}</b></span></p>`
        : html`<p class="outcome">Sent to <b>${name(d.targets.join(", "))}</b> by profile ${name(d.primary)}.</p>`}
      ${d.cached && html`<p>Predicted ${count(d.cached.predicted)} prompt tokens in its prefix cache; ${d.cached.reported === null || d.cached.reported === undefined
        ? "its answer has not said how many were" : `it reported ${count(d.cached.reported)} of ${count(d.cached.prompt)}`}.</p>`}
      ${d.left_out.length > 0 && html`<p>Without ${name(d.left_out.join(", "))}: left out after too many faults.</p>`}
      ${d.profiles.map((profile) => html`<${Profile} key=${profile.profile} decision=${d} profile=${profile} />`)}
    </section>`;
}

function Profile({ decision, profile }) {
  const scorers = profile.candidates[0]?.scores ?? [];
  const original = Object.fromEntries(scorers.map((each) => [each.scorer, each.weight]));
  const [weights, setWeights] = useState(original);
  const [answer, setAnswer] = useState(null);
  const [trouble, setTrouble] = useState("");
  const changed = scorers.some((each) => weights[each.scorer] !== each.weight);
  useEffect(() => {
    if (!changed) {
      setAnswer(null);
      return undefined;
    }
    let gone = false;
    const query = new URLSearchParams({ request_id: decision.request_id, profile: profile.profile, ...weights });
    const timer = setTimeout(() => json(`debug/decisions/what-if?${query}`).then(
      (found) => !gone && (setAnswer(found), setTrouble("")),
      (error) => !gone && setTrouble(error.message),
    ), 100);
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [JSON.stringify(weights)]);
  const rows = answer
    ? answer.ranked.map((each) => ({ ...profile.candidates.find((c) => c.endpoint === each.endpoint), total: each.total, parts: Object.entries(each.parts) }))
    : profile.candidates.map((c) => ({ ...c, parts: c.scores.map((s) => [s.scorer, s.weighted]) }));
  // A part that all candidates have decides nothing, so bars show what is beyond it.
  const least = scorers.map((_, at) => Math.min(...rows.map((row) => row.parts[at][1])));
  const beyond = (row) => row.parts.map(([scorer, part], at) => [scorer, part - least[at]]);
  const most = Math.max(SAME, ...rows.map((row) => beyond(row).reduce((sum, [, part]) => sum + part, 0)));
  const columns = [
    { title: "Endpoint", left: true, value: (c) => c.endpoint, cell: (c) => html`${c.picked && html`<b aria-hidden="true">★ </b>`}${name(c.endpoint)}${c.picked && html`<small> picked</small>`}` },
    { title: "State", left: true, cell: (c) => html`<${Chip} state=${c.state} />` },
    { title: "Advantage by scorer", left: true, cell: (c) => html`<${Bar} parts=${beyond(c)} most=${most} />`, note: "the parts of the total, without what all candidates have" },
    { title: "Total", value: (c) => c.total, cell: (c) => c.total.toFixed(3) },
    ...scorers.map((each, at) => ({ title: each.scorer, value: (c) => c.parts[at][1], cell: (c) => html`${c.parts[at][1].toFixed(3)} <small>${c.scores[at].raw.toFixed(2)}</small>`, note: "part of the total, and the score from 0 to 1" })),
    { title: "Predicted cached", value: (c) => c.predicted_tokens, cell: (c) => count(c.predicted_tokens) },
    { title: "Predicted time", left: true, cell: (c) => name(c.latency) },
  ].filter((column) => (column.title !== "Predicted cached" || rows.some((c) => c.predicted_tokens !== null && c.predicted_tokens !== undefined)) && (column.title !== "Predicted time" || rows.some((c) => c.latency)));
  return html`
    <section class="panel" aria-label=${`Profile ${profile.profile}`}>
      <h3>${profile.shadow ? "Shadow profile" : "Profile"} ${name(profile.profile)}</h3>
      <p>${profile.considered} endpoints came in.${profile.filters.map((f) => html` ${name(f.filter)} kept ${f.kept} and dropped ${f.dropped}${f.names.length > 0 && html` (${name(f.names.join(", "))}${f.dropped > f.names.length && ", …"})`}.`)}</p>
      ${profile.candidates.length > 0 && html`<p class="outcome">${name(profile.picker)} picked <b>${name(profile.picked.join(", "))}</b>${profile.margin === null ? ", the only one left." : profile.tied > 1 ? `: one of ${profile.tied} with the same total.` : `, ${profile.margin.toFixed(3)} above ${name(profile.runner_up)}.`}</p>`}
      ${scorers.length > 0 && decision.request_id && html`
        <fieldset class="sliders"><legend>What if the weights were different?</legend>
          ${scorers.map((each, at) => html`<label><span><i class=${`part p${at % PARTS}`} aria-hidden="true"></i>${name(each.scorer)}</span>
            <input type="range" min="0" max=${Math.max(2, each.weight * 3)} step=${Math.max(2, each.weight * 3) / 60} value=${weights[each.scorer]}
              aria-valuetext=${`weight ${weights[each.scorer]}`} onInput=${(event) => setWeights({ ...weights, [each.scorer]: Number(event.target.value) })} />
            <output>${Number(weights[each.scorer].toFixed(2))}</output></label>`)}
          <p role="status">${trouble ? name(trouble) : answer
            ? html`With these weights, ${answer.same ? "the same endpoint is best" : html`<b>${name(answer.ranked[0].endpoint)}</b> is best`}${answer.margin !== null && (answer.margin < SAME ? ", with the same total as the next" : `, ${answer.margin.toFixed(3)} above the next`)}.`
            : "These are the weights of the decision."}</p>
          <button type="button" disabled=${!changed} onClick=${() => setWeights(original)}>Weights of the decision</button>
        </fieldset>`}
      <${Table} caption=${`Candidates of ${name(profile.profile)}`} columns=${columns} rows=${rows} rowKey=${(c) => `${c.endpoint} ${c.address}`} empty="No endpoint was left." />
      ${profile.more > 0 && html`<p>${profile.more} more candidates had lower totals.</p>`}
    </section>`;
}

function Bar({ parts, most }) {
  return html`<span class="bar" role="img" aria-label=${parts.map(([scorer, part]) => `${scorer} ${part.toFixed(3)}`).join(", ")}>
    ${parts.map(([scorer, part], at) => html`<i class=${`part p${at % PARTS}`} title=${`${name(scorer)} ${part.toFixed(3)}`} style=${{ width: `${(100 * Math.max(0, part)) / most}%` }}></i>`)}</span>`;
}

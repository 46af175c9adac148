// The configuration in force, its warnings, what became of the last reload, and a candidate if one is tried.
import { useState } from "./vendor/hooks.mjs";
import { Table, html } from "./parts.js";
import { count, long, name, share, time } from "./format.js";

export function Configuration({ state }) {
  const { configuration, settings } = state;
  const tryout = configuration?.tryout;
  const sides = [
    { title: "Configuration", left: true, cell: (s) => s.configuration.replace("_", " ") },
    { title: "Requests", cell: (s) => count(s.requests) },
    { title: "Errors", cell: (s) => share(s.error_share) },
    { title: "First token", cell: (s) => time(s.first_token_p50_s) },
    { title: "95 %", cell: (s) => time(s.first_token_p95_s) },
    { title: "From cache", cell: (s) => share(s.cached_share) },
  ];
  return html`
    ${configuration && html`<p>Generation ${configuration.generation} (${name(configuration.hash)}) is in force in ${configuration.workers} of ${state.workers_serving} workers.
      ${" "}It comes from ${name(settings.source)}.</p>`}
    ${configuration?.last_reload_failed
      ? html`<div class="findings"><div class="error"><b>The last reload was refused; the configuration before it stays in force</b><pre tabindex="0">${configuration.last_reload_failed}</pre></div></div>`
      : html`<p class="good">The last reload succeeded, or there was none.</p>`}
    ${tryout && html`<h2>Candidate ${tryout.generation}</h2><p>From ${name(tryout.source)}: ${tryout.share ? `decides ${share(tryout.share)} of the requests` : "a shadow, compared with the real decisions"}.
      ${" "}${count(tryout.agreed)} decisions agreed, ${count(tryout.differed)} differed, ${count(tryout.failed)} failed.</p>
      <${Table} caption="Both configurations" columns=${sides} rows=${tryout.sides} rowKey=${(s) => s.configuration} />`}
    ${settings.effective === undefined ? html`<p class="notice">${state.only === undefined ? html`Each pool has its own configuration: choose a <a href="#pools">pool</a>.` : "The configurations of all pools are too long for this page: `epp config check FILE` prints them."}</p>` : html`
    <h2>Warnings</h2>
    ${settings.warnings.length ? html`<ul>${settings.warnings.map((each) => html`<li>${long(each)}</li>`)}</ul>` : html`<p class="good">No warnings.</p>`}
    <h2 id="effective">Effective configuration, with all defaults</h2>
    <p>A number is the line of ${name(settings.source)} that gives the value. A line without a number is a default.</p>
    <pre class="origins" tabindex="0" role="region" aria-labelledby="effective">${settings.effective.trimEnd().split("\n").map(
      (line, at) => html`<span class=${settings.origins[at] ? "given" : "default"}><i>${settings.origins[at] || ""}</i>${line}${"\n"}</span>`,
    )}</pre>`}
    <${Flags} flags=${settings.flags} />`;
}

// The flags of the picker: those that were given, or all.
function Flags({ flags }) {
  const [all, setAll] = useState(false);
  const rows = Object.entries(flags).map(([flag, each]) => ({ flag, ...each })).filter((each) => all || each.origin !== "default");
  const columns = [
    { title: "Flag", left: true, value: (f) => f.flag, cell: (f) => `--${f.flag}` },
    { title: "Value", left: true, value: (f) => f.value, cell: (f) => name(f.value || "(empty)") },
    { title: "Origin", left: true, value: (f) => f.origin, cell: (f) => name(f.origin === `--${f.flag}` ? "command line" : f.origin) },
  ];
  return html`
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label><input type="checkbox" checked=${all} onChange=${(event) => setAll(event.target.checked)} /> Show defaults, too</label>
    </form>
    <${Table} caption=${all ? "Flags" : "Flags that were given"} columns=${columns} rows=${rows} rowKey=${(f) => f.flag} initial=${{ at: 0, down: false }} empty="All flags have their defaults." />`;
}

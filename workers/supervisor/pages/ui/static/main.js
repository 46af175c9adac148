// The page: a header with the state of the picker, the navigation, and one view.
import { render } from "./vendor/preact.mjs";
import { useEffect, useRef, useState } from "./vendor/hooks.mjs";
import { html } from "./parts.js";
import { Store } from "./store.js";
import { age, name } from "./format.js";
import { Pools, ofPool } from "./pools.js";
import { Overview } from "./overview.js";
import { Endpoints } from "./endpoints.js";
import { Decisions } from "./decisions.js";
import { FlowControl } from "./flow.js";
import { Configuration } from "./configuration.js";
import { Health } from "./health.js";

const VIEWS = [
  { id: "pools", title: "Pools", View: Pools, when: (state) => state.pools !== undefined },
  { id: "overview", title: "Overview", View: Overview },
  { id: "endpoints", title: "Endpoints", View: Endpoints },
  { id: "decisions", title: "Decisions", View: Decisions },
  { id: "flow", title: "Flow control", View: FlowControl, when: (state) => state.flow_control !== undefined },
  { id: "configuration", title: "Configuration", View: Configuration, when: (state) => state.settings !== undefined },
  { id: "health", title: "Health", View: Health },
];
const dark = matchMedia("(prefers-color-scheme: dark)");

function useHash() {
  const [hash, setHash] = useState(location.hash.slice(1));
  useEffect(() => {
    const changed = () => {
      setHash(location.hash.slice(1));
      document.getElementById("view")?.focus({ preventScroll: true });
    };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return hash;
}

// The address #pools/NAME shows the views of this pool, until #pools shows the list again.
function Page({ store, state: whole, status }) {
  const hash = useHash();
  const pool = useRef("");
  const [theme, setTheme] = useState(dark.matches);
  useEffect(() => {
    const changed = () => setTheme(dark.matches);
    dark.addEventListener("change", changed);
    return () => dark.removeEventListener("change", changed);
  }, []);
  if (whole === null) return html`<p class="notice" role="status">${status === "lost" ? "No connection to the picker. Trying again …" : "Loading the state of the picker …"}</p>`;
  const [first, ...rest] = hash.split("/");
  if (first === "pools") pool.current = decodeURIComponent(rest.join("/"));
  const only = whole.pools?.[pool.current] ? pool.current : "";
  const state = only ? ofPool(whole, only) : whole;
  const wanted = first === "pools" && only ? "overview" : first;
  const selected = first === "pools" ? "" : rest.join("/");
  const views = VIEWS.filter((view) => view.when === undefined || view.when(state));
  const { id, title, View } = views.find((view) => view.id === wanted) ?? views[0];
  const errors = state.findings.filter((each) => each.severity === "error").length;
  const warnings = state.findings.length - errors;
  const verdict = errors ? `${errors} error${errors > 1 ? "s" : ""}` : warnings ? `${warnings} warning${warnings > 1 ? "s" : ""}` : "healthy";
  document.title = `${title} · ${name(state.instance.name)}`;
  return html`
    <a class="skip" href="#${id}" onClick=${() => document.getElementById("view").focus()}>Skip to the view</a>
    <header>
      <h1>${name(state.instance.name)} <small>${whole.pools && !only ? `${Object.keys(whole.pools).length} pools` : html`pool ${name(state.pool)}`}, ${name(state.instance.life)}, up ${age(state.instance.uptime_s)}</small></h1>
      <p class="verdict">
        <a class=${`chip ${errors ? "down" : warnings ? "stale" : "fresh"}`} href="#health">${verdict}</a>
        <span class=${`chip ${status === "live" ? "fresh" : "down"}`} role="status">${status === "live" ? (store.paused ? "paused" : "live") : "no connection"}</span>
        <button type="button" aria-pressed=${store.paused ? "true" : "false"} onClick=${() => store.pause(!store.paused)}>Pause</button>
      </p>
    </header>
    <nav aria-label="Views"><ul>${views.map(
      (view) => html`<li><a href=${`#${view.id}`} aria-current=${view.id === id ? "page" : undefined}>${view.title}</a></li>`,
    )}</ul></nav>
    <main id="view" tabindex="-1" aria-label=${title}>
      <${View} state=${state} theme=${theme} selected=${selected ? decodeURIComponent(selected) : ""} />
    </main>`;
}

const place = document.getElementById("page");
const store = new Store((state, status) => render(html`<${Page} store=${store} state=${state} status=${status} />`, place));
place.replaceChildren();
render(html`<${Page} store=${store} state=${null} status="connecting" />`, place);

// Follows the state of the picker: the whole state first, then one JSON Merge Patch (RFC 7396) per second.
// A patch makes new objects only for what has changed, so that views can compare by identity.

export function merged(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const result = target !== null && typeof target === "object" && !Array.isArray(target) ? { ...target } : {};
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete result[name];
    else result[name] = merged(result[name], value);
  }
  return result;
}

export class Store {
  // `changed(state, status)` is called after each frame, and when the connection changes. `status`: connecting, live or lost.
  constructor(changed) {
    this.state = null;
    this.status = "connecting";
    this.paused = false;
    this.changed = changed;
    this.source = new EventSource("debug/state/stream");
    this.source.addEventListener("state", (event) => this.take(JSON.parse(event.data)));
    this.source.addEventListener("patch", (event) => this.take(merged(this.state, JSON.parse(event.data))));
    this.source.addEventListener("error", () => this.lost());
  }

  take(state) {
    this.state = state;
    this.status = "live";
    if (!this.paused) this.changed(this.state, this.status);
  }

  lost() {
    this.status = "lost"; // the browser connects again by itself, except after a refusal
    this.changed(this.state, this.status);
    if (this.source.readyState === EventSource.CLOSED) setTimeout(() => location.reload(), 5000);
  }

  pause(paused) {
    this.paused = paused;
    if (this.state !== null) this.changed(this.state, this.status);
  }
}

export async function json(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer.json();
}

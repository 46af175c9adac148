// Writes numbers as `epp top` does. An unknown value is a dash.

export const UNKNOWN = "–";
const STEPS = [[1e9, "G"], [1e6, "M"], [1e4, "k"]];

export function count(number) {
  if (number === undefined || number === null) return UNKNOWN;
  for (const [size, letter] of STEPS) {
    if (number >= size) {
      const scaled = number / (letter === "k" ? 1e3 : size);
      return scaled < 100 ? `${scaled.toFixed(1)}${letter}` : `${Math.round(scaled)}${letter}`;
    }
  }
  return `${Math.round(number * 100) / 100}`;
}

export const rate = (perSecond) =>
  perSecond === undefined || perSecond === null ? UNKNOWN : perSecond < 100 ? perSecond.toFixed(1) : count(Math.round(perSecond));

export const share = (value) => (value === undefined || value === null ? UNKNOWN : value > 0 && value < 0.05 ? `${(value * 100).toFixed(1)} %` : `${Math.round(value * 100)} %`);

export function time(seconds) {
  if (seconds === undefined || seconds === null) return UNKNOWN;
  if (seconds < 0.01) return `${(seconds * 1e3).toFixed(1)} ms`;
  return seconds < 1 ? `${Math.round(seconds * 1e3)} ms` : `${seconds.toFixed(1)} s`;
}

export function age(seconds) {
  if (seconds === undefined || seconds === null) return UNKNOWN;
  for (const [size, letter] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${letter}`;
  }
  return `${Math.floor(seconds)} s`;
}

export const bytes = (number) =>
  number === undefined || number === null ? UNKNOWN : number < 1024 ? `${number} B` : number < 1 << 20 ? `${Math.round(number / 1024)} KiB` : `${Math.round(number / (1 << 20))} MiB`;

// Names come from clients and servers: control characters and text direction must not change the page around them.
const SHORT_MAX = 48;
const SHOWN_MAX = 120;
const LONG_MAX = 2000;
export const name = (text) => clean(text, SHOWN_MAX);
export const short = (text) => clean(text, SHORT_MAX);
export const long = (text) => clean(text, LONG_MAX);

function clean(text, most) {
  const shown = String(text ?? "").slice(0, most + 1).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, "�");
  return shown.length > most ? `${shown.slice(0, most)}…` : shown;
}

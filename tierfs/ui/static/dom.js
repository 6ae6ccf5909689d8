// Elements, numbers, times. Text only ever becomes text: nothing here parses HTML.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  put(element, children);
  return element;
}

export function put(element, children) {
  const flat = [children].flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  element.replaceChildren(...flat.map((child) => (child instanceof Node ? child : String(child))));
}

// As tierfs.units.format_bytes writes it: binary units, three significant digits.
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  if (Math.abs(count) < 1024) return `${Math.round(count)} B`;
  let value = count / 1024, power = 0;
  while (Math.abs(value) >= 1024 && power < 4) { value /= 1024; power += 1; }
  const digits = Math.abs(value) >= 999.5 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
  return `${digits} ${["KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.round(value / 60)} min`;
  return value < 86400 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} d`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value; // NaN, Infinity
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  return String(Number(value.toPrecision(4)));
}

export const count = (value, one) => `${value.toLocaleString("en")} ${one}${value === 1 ? "" : "s"}`;

const TODAY = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
const YEAR = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric" });

// A time in local words, with UTC on hover.
export function time(iso) {
  if (!iso) return h("span", { class: "muted" }, "–");
  const at = new Date(iso), now = new Date();
  const near = at.toDateString() === now.toDateString() ? TODAY : at.getFullYear() === now.getFullYear() ? DAY : YEAR;
  return h("time", { datetime: iso, title: `${iso.slice(0, 19).replace("T", " ")} UTC` }, near.format(at));
}

export async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters))
    for (const one of [value].flat()) if (one !== undefined && one !== null) query.append(name, one);
  const answer = await fetch(`${path}?${query}`);
  if (!(answer.headers.get("content-type") ?? "").includes("json")) throw new Error((await answer.text()).trim());
  const document = await answer.json();
  if (document.error) throw new Error(document.error.message);
  return { running: answer.status === 202, document };
}

// Ask for a job until it is done. `progress` gets what is done and the total.
export async function work(path, parameters, progress, isWanted) {
  for (;;) {
    const { running, document } = await ask(path, parameters);
    if (!isWanted()) return null;
    if (!running) return document;
    progress(document);
  }
}

export function command(text) {
  const button = h("button", { class: "copy", type: "button", title: "Copy" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.previousSibling);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return h("span", { class: "command" }, h("code", {}, text), button);
}

export const problem = (error) => h("p", { class: "card problem", role: "alert" }, error.message ?? String(error));
export const meter = (text) => h("p", { class: "card muted", role: "status" }, text);

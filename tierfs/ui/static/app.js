// The frame of the page: the session, live events, and which view is shown.

import { ask, h, put } from "./dom.js";
import { checkpointView, diffView } from "./checkpoint.js";
import { redraw } from "./chart.js";
import { filesView } from "./files.js";
import { overview } from "./overview.js";
import { runView } from "./run.js";

const VIEWS = { "": overview, checkpoint: checkpointView, diff: diffView, files: filesView, run: runView };
const TABS = [["", "Overview"], ["run", "Run"], ["files", "Files"]];
const SILENT_MS = 2800, ASK_AGAIN_MS = 5000;
const byId = (id) => document.getElementById(id);

// What all views share: the newest state of each store, and its checkpoints by path.
export const state = { about: null, stores: [], rows: new Map(), files: new Map(), lists: new Map(), listeners: new Set() };
let view = null, heard = 0, asked = 0, source = null;

export const changed = (what, store) => { for (const listener of state.listeners) listener(what, store); };

export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parameters = new URLSearchParams(query);
  return { name: path in VIEWS ? path : "", parameters, store: Math.min(Number(parameters.get("s")) || 0, Math.max(0, state.stores.length - 1)) };
}

export function address(name, parameters = {}) {
  const query = new URLSearchParams({ ...(state.stores.length > 1 ? { s: route().store } : {}), ...parameters });
  return `#/${name}${query.size ? `?${query}` : ""}`;
}

export const go = (name, parameters) => { location.hash = address(name, parameters); };

function show() {
  const at = route();
  view?.close?.();
  state.listeners.clear();
  put(byId("tabs"), TABS.map(([name, title]) =>
    h("a", { href: address(name), "aria-current": name === at.name || (name === "" && ["checkpoint", "diff"].includes(at.name)) ? "page" : null }, title)));
  byId("picker").hidden = state.stores.length < 2;
  byId("stores").value = String(at.store);
  const main = byId("main");
  view = VIEWS[at.name](at);
  put(main, [view.element]);
  document.title = `${view.title ?? "tierfs"} · tierfs`;
  scrollTo(0, 0);
}

// When this browser's clock showed the moment at which a list was begun to be read; null if none was.
const since = (age_s) => (age_s === null || age_s === undefined ? null : Date.now() - 1000 * age_s);

// Fetch the rows that changed since the last time. The server looks whether those on screen are still there.
const fetching = new Map();
export async function fetchRows(store) {
  if (fetching.has(store)) { fetching.set(store, true); return; }
  fetching.set(store, false);
  try {
    const first = !state.lists.has(store); // The newest rows first, so that something is seen at once.
    asked = Date.now();
    const about = state.about;
    const row = route().store === store ? view?.onScreen?.() : null;
    const { document } = await ask("/api/checkpoints.json", { store, since: state.lists.get(store)?.version ?? 0, limit: first ? 100 : null, row });
    if (about !== state.about) { fetching.set(store, true); return; } // All is loaded again: this may be of the last server.
    const rows = state.rows.get(store) ?? new Map();
    if (first && document.checkpoints.length === 100) document.version = 0;
    if (first) fetching.set(store, true);
    for (const path of document.gone) rows.delete(path);
    for (const row of document.checkpoints) rows.set(row.path, row);
    state.rows.set(store, rows);
    if (document.files) state.files.set(store, document.files);
    state.lists.set(store, { ...document, checkpoints: null, files: null, at: since(document.age_s) });
    changed("rows", store);
  } catch (error) {
    silent(error.message);
  } finally {
    const again = fetching.get(store);
    fetching.delete(store);
    if (again) fetchRows(store);
  }
}

async function load() {
  const { document } = await ask("/api/stores.json");
  state.about = document;
  state.stores = document.stores;
  for (const known of [state.rows, state.files, state.lists]) known.clear();
  put(byId("stores"), state.stores.map((store) => h("option", { value: store.store }, store.url)));
  for (const store of state.stores) fetchRows(store.store);
  show();
}

function silent(why) {
  byId("live").className = "live off";
  byId("live").textContent = "offline";
  byId("banner").hidden = false;
  byId("banner").textContent = `The server does not answer, so these figures are old. Is \`tierfs ui\` running? ${why ?? ""}`;
}

function alive() {
  heard = Date.now();
  if (byId("live").textContent === "live") return;
  byId("live").className = "live on";
  byId("live").textContent = "live";
  byId("banner").hidden = true;
}

function listen() {
  source?.close();
  source = new EventSource("/api/events");
  source.addEventListener("hello", async (event) => {
    alive();
    if (state.about && state.about.server !== JSON.parse(event.data).server) await load().catch((error) => silent(error.message));
  });
  source.addEventListener("beat", alive);
  source.addEventListener("store", (event) => {
    alive();
    const fresh = JSON.parse(event.data), old = state.stores[fresh.store];
    if (!old) return;
    const history = old.history.filter((sample) => sample[0] !== fresh.history[0]?.[0]).concat(fresh.history);
    const list = state.lists.get(fresh.store);
    if (list) list.at = since(fresh.list_age_s);
    state.stores[fresh.store] = { ...fresh, history: history.filter((sample) => sample[0] > Date.now() / 1000 - 600) };
    changed("status", fresh.store);
    if ((list?.version ?? -1) !== fresh.list[0] || list?.looked !== fresh.list[1]) fetchRows(fresh.store);
  });
  source.addEventListener("error", () => silent());
}

setInterval(() => {
  changed("clock", route().store);
  if (!document.hidden && state.about && view?.onScreen && Date.now() - asked > ASK_AGAIN_MS) fetchRows(route().store);
  if (Date.now() - heard <= SILENT_MS) return;
  silent();
  if (source?.readyState === EventSource.CLOSED || Date.now() - heard > 3 * SILENT_MS) { heard = Date.now() - SILENT_MS; listen(); }
}, 1000);

function theme() {
  const themes = ["auto", "light", "dark"], button = byId("theme");
  const set = (name) => {
    document.documentElement.style.colorScheme = name === "auto" ? "light dark" : name;
    button.textContent = { auto: "◐", light: "☀", dark: "☾" }[name];
    button.setAttribute("aria-label", `Colours: ${name}`);
    button.title = `Colours: ${name}`;
    localStorage.setItem("theme", name);
    redraw();
  };
  button.addEventListener("click", () => set(themes[(themes.indexOf(localStorage.getItem("theme") ?? "auto") + 1) % 3]));
  set(themes.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto");
}

async function start() {
  theme();
  const token = /^#token=(.+)$/.exec(location.hash)?.[1];
  if (token) {
    const answer = await fetch("/api/login", { headers: { Authorization: `Bearer ${token}` } });
    if (!answer.ok) { put(byId("main"), [h("p", { class: "card problem" }, await answer.text())]); return; }
    history.replaceState(null, "", "/#/");
  }
  addEventListener("hashchange", show);
  byId("stores").addEventListener("change", (event) => { location.hash = `#/?s=${event.target.value}`; });
  try {
    await load();
  } catch (error) {
    put(byId("main"), [h("p", { class: "card problem", role: "alert" }, error.message)]);
    if (error.message.includes("token")) return;
  }
  listen();
}

start();

// The first view: alarms, tiers, throughput, and checkpoints by level.

import { address, go, state } from "./app.js";
import { ask, bytes, command, count, h, number, put, seconds, time } from "./dom.js";
import { chart } from "./chart.js";
import { fileColumns } from "./files.js";
import { Grid } from "./grid.js";

const LEVELS = ["staged", "local", "peer", "object"];
const OLD_S = 60; // The server lists again within 30 s, unless a listing itself takes long.
const TIERS = { device: "GPU", ram: "Shared memory", nvme: "Disk", object: "Object tier" };

export function overview({ store }) {
  const alarms = h("div", { id: "alarms", "aria-live": "polite" });
  const tiers = h("div", { class: "tiers" });
  const flow = h("dl", { class: "figures" });
  const history = () => columns(state.stores[store]?.history ?? []);
  const speed = chart({
    title: "To the object tier", note: "the last ten minutes", window: () => [Date.now() / 1000 - 600, Date.now() / 1000], format: (value) => `${bytes(value)}/s`, least: 1024, height: 110,
    data: history(), series: [{ label: "rate", colour: "--accent", fill: true }],
  });
  speed.box.append(flow);
  const list = checkpoints(store);
  const element = h("div", {}, h("h1", { class: "hidden" }, "Overview"), alarms,
    h("section", { "aria-label": "Tiers" }, h("h2", {}, "Tiers"), h("div", { class: "above" }, tiers, speed.box)), list.element);
  let said = "";
  const update = (what, number) => {
    if (number !== store) return;
    if (what === "rows") { list.update(); return; }
    if (what === "clock") { list.tick(); return; }
    const status = state.stores[store];
    if (!status) return;
    const text = JSON.stringify(status.alarms);
    if (text !== said) { said = text; put(alarms, drawAlarms(status)); }
    if (!status.report) return;
    put(tiers, drawTiers(status));
    put(flow, drawFlow(status));
    speed.set(history());
    list.tick();
  };
  state.listeners.add(update);
  update("status", store);
  update("rows", store);
  return { element, title: state.stores[store]?.url, onScreen: list.onScreen };
}

const columns = (samples) => [samples.map((sample) => sample[0]), samples.map((sample) => sample[1])];

function drawAlarms(status) {
  if (!status.alarms.length) return h("p", { class: "well" }, h("span", { class: "tick", "aria-hidden": "true" }, "✓"), "No alarms");
  return h("ul", { class: "alarms" }, status.alarms.map((alarm) => h("li", { class: `card ${alarm.severity}` },
    h("strong", {}, alarm.severity === "problem" ? "Problem" : "Note"),
    h("div", {}, h("p", {}, alarm.what), alarm.do ? h("p", { class: "muted" }, alarm.do) : null, alarm.command ? command(alarm.command) : null))));
}

function drawTiers({ report }) {
  const names = Object.keys(TIERS).filter((tier) => report.tiers[tier] || tier !== "device");
  const cards = names.map((tier) => {
    const values = report.tiers[tier];
    const title = h("h3", {}, TIERS[tier], h("span", { class: "chip" }, values ? values.gives || "off" : "off"));
    if (!values) return h("div", { class: "card tier off" }, title, h("p", { class: "muted" }, "Not used on this host"));
    if (tier === "object") return h("div", { class: "card tier" }, title, objectTier(values));
    const { used_bytes: used, budget_bytes: budget, dirty_bytes: dirty, clean_bytes: clean } = values;
    return h("div", { class: "card tier" }, title,
      h("p", { class: "big" }, bytes(used), h("small", {}, ` of ${bytes(budget)}`)),
      h("div", { class: "bar", role: "img", "aria-label": `${bytes(dirty)} dirty and ${bytes(clean)} clean of ${bytes(budget)}` },
        h("i", { class: "dirty", vars: { width: `${share(dirty, budget)}%` } }), h("i", { class: "clean", vars: { width: `${share(clean, budget)}%` } })),
      tier === "device"
        ? h("p", { class: "muted" }, `${values.snapshots} of ${values.generations} snapshots`)
        : h("p", { class: "keys" }, h("span", { class: "key dirty" }, `${bytes(dirty)} dirty`), h("span", { class: "key clean" }, `${bytes(clean)} clean`)));
  });
  const peers = report.peers;
  if (peers) cards.splice(cards.length - 1, 0, h("div", { class: "card tier" }, h("h3", {}, "Peers", h("span", { class: "chip" }, "peer")),
    h("p", { class: "big" }, `${peers.hosts.filter((host) => host.connected).length}`, h("small", {}, ` of ${peers.wanted} connected`)),
    h("p", { class: "muted" }, `holds ${bytes(peers.holds_bytes)} for ${count(peers.holds_for.length, "host")}`)));
  return cards;
}

const share = (part, whole) => (part && whole ? Math.min(100, (100 * part) / whole) : 0);

function objectTier(values) {
  const counts = Object.entries(values.requests ?? {}).filter(([name]) => name.startsWith("flusher_"));
  const sum = (key) => counts.reduce((total, [, one]) => total + one[key], 0);
  const put_ = counts.filter(([name]) => name.startsWith("flusher_put")).reduce((total, [, one]) => total + one.bytes, 0);
  return [
    h("p", { class: "big" }, bytes(counts.length ? put_ : null), h("small", {}, " sent")),
    h("p", { class: "muted" }, `${count(sum("requests"), "request")} by the flusher, `, h("span", { class: sum("errors") ? "bad" : null }, count(sum("errors"), "error"))),
    h("p", { class: "muted" }, `survives the ${values.survives}`),
  ];
}

function drawFlow(status) {
  const { report } = status;
  const flusher = report.flusher.silent ? "does not answer" : report.flusher.running ? `runs, pid ${report.flusher.pid}` : "not running";
  const rates = status.history.map((sample) => sample[1]), known = rates.filter((rate) => rate !== null);
  return [
    ["Now", `${bytes(rates.at(-1))}/s`],
    ["Mean", `${bytes(known.length ? known.reduce((a, b) => a + b, 0) / known.length : null)}/s`],
    ["Queue", report.queue_files ? `${count(report.queue_files, "file")}, ${bytes(report.queue_bytes)}` : "empty"],
    ["Oldest", report.queue_files ? seconds(report.oldest_age_s) : "–"],
    ["Flusher", flusher],
  ].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}

export function dots(row, withPeers) {
  const levels = LEVELS.filter((level) => level !== "peer" || withPeers);
  const text = levels.map((level) => `${level} ${Math.round(100 * row.reached[level])} %`).join(", ");
  return h("span", { class: "dots", role: "img", "aria-label": text, title: text },
    levels.map((level) => h("i", { class: row.reached[level] >= 1 ? "full" : row.reached[level] > 0 ? "part" : null, vars: { "--p": `${Math.round(360 * row.reached[level])}deg` } })));
}

export function stateChip(row) {
  const drains = row.state !== "damaged" && (row.waiting.length || (row.state === "complete" && row.level !== "object"));
  const name = row.marked_damaged ? "marked damaged" : drains ? "draining" : row.state;
  return h("span", { class: `chip ${row.marked_damaged ? "damaged" : name}`, title: [...row.problems, ...row.waiting].join("\n") || null }, name);
}

// The directory of a run, from the URL of the page on.
const runOf = (row) => row.name.split("/").slice(0, -1).join("/");

function checkpoints(store) {
  let metric = null, text = "", whatIf = null;
  const filter = h("input", { type: "search", placeholder: "Name or step", "aria-label": "Filter the checkpoints" });
  const metrics = h("select", { "aria-label": "Metric to show" });
  const rules = h("input", { type: "text", placeholder: "latest:3 best:2:loss", "aria-label": "Rules of what to keep", size: 18 });
  const apply = h("button", { type: "submit" }, "Try");
  const compare = h("button", { type: "button", disabled: true, class: "primary" }, "Compare");
  const about = h("p", { class: "muted", role: "status" }), age = h("p", {});
  const said = h("p", { class: "problem card", hidden: true, role: "alert" });
  const list = () => state.lists.get(store) ?? { best: {} };
  const reasons = (row) => whatIf?.get(row.path) ?? row;
  const column = (id, title, width, cell, more = {}) => ({ id, title, width, cell, ...more });
  const metricCell = (row) => {
    const value = row.metrics[metric], best = list().best[metric] ?? {};
    const mark = row.path === best.min ? " ▾" : row.path === best.max ? " ▴" : "";
    return value === undefined ? "–" : h("span", { title: mark ? `the ${mark === " ▾" ? "lowest" : "highest"} ${metric}` : null }, number(value), mark);
  };
  const why = (row) => {
    const { kept, reasons: words } = reasons(row);
    if (row.left) return h("span", { class: "muted" }, "left behind by the run");
    if (kept === false) return h("span", { class: "going" }, "would be pruned");
    return h("span", { title: words.join(", ") }, row.pinned ? "★ " : "", words.filter((word) => word !== "pinned" || words.length === 1).join(", "));
  };
  const make = (hasRuns) => [
    column("select", "", "28px", (row) => h("span", { class: "pickbox", "aria-hidden": "true" }, grid.picked.has(row.path) ? "●" : "○"), { wide: true }),
    column("step", "Step", "minmax(56px, .5fr)", (row) => h("a", { href: address("checkpoint", { path: row.path }), tabindex: -1, title: row.name }, row.step ?? row.name), { right: true, sort: (row) => row.step }),
    ...(hasRuns ? [column("run", "Run", "minmax(60px, 1fr)", (row) => h("span", { title: row.path }, runOf(row) || "/"), { sort: runOf })] : []),
    column("levels", "Level", "minmax(104px, 1.2fr)", (row) => [dots(row, Boolean(state.stores[store]?.report?.peers)), h("span", { class: "level" }, row.level ?? "–")], { sort: (row) => LEVELS.indexOf(row.level) }),
    column("state", "State", "minmax(96px, 1fr)", stateChip, { sort: (row) => row.state, wide: true }),
    column("saved", "Saved", "minmax(84px, 1.1fr)", (row) => time(row.created), { sort: (row) => row.created, wide: hasRuns }),
    column("size", "Size", "minmax(76px, 1fr)", (row) => bytes(row.size), { right: true, sort: (row) => row.size }),
    column("stored", "Stored", "minmax(76px, 1fr)", (row) => bytes(row.stored), { right: true, sort: (row) => row.stored, wide: true }),
    column("kind", "Kind", "minmax(56px, .6fr)", (row) => row.kind ?? row.format ?? "–", { sort: (row) => row.kind, wide: true }),
    ...(metric ? [column("metric", metric, "minmax(90px, 1fr)", metricCell, { right: true, sort: (row) => row.metrics[metric], wide: true })] : []),
    column("why", "Why it is kept", "minmax(150px, 2.4fr)", why, { wide: true }),
  ];
  const files = new Grid({
    label: "Single files", key: (row) => row.path, columns: fileColumns, height: 320, open: (row) => go("files", { path: row.path.split("/").slice(0, -1).join("/") }),
  });
  const single = h("section", { "aria-label": "Single files" }, h("h2", {}, "Single files"),
    h("p", { class: "muted" }, "Checkpoints that are one file, such as Lightning's. tierfs does not look inside."), files.whole);
  const grid = new Grid({
    label: "Checkpoints", columns: [], key: (row) => row.path, open: (row) => go("checkpoint", { path: row.path }), empty: "",
    pick: (picked) => { compare.disabled = picked.size !== 2; for (const line of grid.shown.values()) put(line.element.querySelector(".pickbox"), [picked.has(line.row.path) ? "●" : "○"]); },
  });
  const update = () => {
    const all = [...(state.rows.get(store)?.values() ?? [])];
    const names = Object.keys(list().best);
    if (names.join("\n") !== [...metrics.options].map((one) => one.value).join("\n")) {
      put(metrics, names.map((name) => h("option", { value: name }, name)));
      metric = names.includes(metric) ? metric : names.includes("loss") ? "loss" : names.find((name) => name.includes("loss")) ?? names[0] ?? null;
      if (metric) metrics.value = metric;
    }
    metrics.hidden = names.length < 2;
    grid.columns = make(new Set(all.map(runOf)).size > 1);
    grid.heads();
    all.sort((a, b) => (b.step ?? -1) - (a.step ?? -1) || (a.path < b.path ? 1 : -1));
    const those = state.files.get(store) ?? [];
    single.hidden = !those.length;
    if (those !== files.all) files.set(those);
    grid.set(text ? all.filter((row) => row.name.toLowerCase().includes(text) || String(row.step) === text || row.state === text || row.level === text) : all);
    tick();
  };
  const tick = () => {
    const { found = 0, looked = 0, at = null } = list(), rows = [...(state.rows.get(store)?.values() ?? [])];
    const sizes = rows.map((row) => row.size).filter((size) => size !== null);
    const said = looked < found ? `Reading ${looked.toLocaleString("en")} of ${found.toLocaleString("en")} …` : at === null ? "Reading the list …"
      : `${count(found, "checkpoint")}, ${bytes(sizes.length || !found ? sizes.reduce((a, b) => a + b, 0) : null)}${whatIf ? `; these rules would prune ${[...whatIf.values()].filter((one) => !one.kept).length}` : ""}`;
    if (about.textContent !== said) about.textContent = said;
    const age_s = at === null ? null : (Date.now() - at) / 1000;
    age.textContent = at === null ? "" : `listed ${age_s < 60 ? `${Math.round(age_s)} s` : seconds(age_s)} ago`;
    age.className = age_s > OLD_S ? "bad" : "muted";
    grid.empty.textContent = at === null ? "The list has not been read yet." : rows.length ? "No checkpoint is like that." : "No checkpoint is here yet. Save one: `dcp.save(state, storage_writer=tierfs.dcp.TierWriter(URL))`.";
  };
  let typing = 0;
  filter.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => { text = filter.value.trim().toLowerCase(); update(); }, 60); });
  metrics.addEventListener("change", () => { metric = metrics.value; update(); });
  compare.addEventListener("click", () => {
    const rows = [...grid.picked].map((path) => state.rows.get(store).get(path)).sort((a, b) => (a.step ?? 0) - (b.step ?? 0));
    go("diff", { a: rows[0].path, b: rows[1].path });
  });
  const form = h("form", { class: "rules", title: "As `tierfs prune --dry-run --keep RULE` decides" }, h("label", {}, "Keep ", rules), apply);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    said.hidden = true;
    try {
      const keep = rules.value.trim().split(/\s+/).filter(Boolean);
      whatIf = keep.length ? new Map((await ask("/api/prune.json", { store, keep })).document.checkpoints.map((one) => [one.path, one])) : null;
    } catch (error) {
      whatIf = null;
      said.hidden = false;
      said.textContent = error.message;
    }
    update();
  });
  const element = h("section", { "aria-label": "Checkpoints" },
    h("div", { class: "title" }, h("h2", {}, "Checkpoints"), about, age, h("div", { class: "spring" }), filter, metrics, form, compare), said, grid.whole, single);
  return { element, update, tick, onScreen: () => [...grid.shown.values()].map((line) => line.row.path) };
}

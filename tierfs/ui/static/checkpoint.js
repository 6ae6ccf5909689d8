// One checkpoint, and the differences between two.

import { address, state } from "./app.js";
import { bytes, command, count, h, meter, number, problem, put, time, work } from "./dom.js";
import { Grid } from "./grid.js";
import { dots, stateChip } from "./overview.js";

// "model.layers.12.mlp.weight" is part 12 of "model.layers". Only names with a number have a layer.
export function layerOf(name) {
  const parts = name.split("."), at = parts.findIndex((part) => /^\d+$/.test(part));
  return at < 1 || at === parts.length - 1 ? null : { group: parts.slice(0, at).join("."), index: Number(parts[at]) };
}

const facts = (pairs) => h("dl", { class: "figures" }, pairs.filter(([, value]) => value !== null && value !== undefined)
  .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

const back = () => h("p", {}, h("a", { href: address("") }, "← Overview"));
const progressText = ({ done, total }, what) => (total ? `${what}: ${Math.min(100, Math.round((100 * done) / total))} %` : `${what} …`);

export function checkpointView({ store, parameters }) {
  const path = parameters.get("path") ?? "";
  let isOpen = true;
  const top = h("div"), below = h("div"), coding = h("button", { type: "button", class: "primary" }, "Show the encoding");
  const filter = h("input", { type: "search", placeholder: "Filter tensors by name", "aria-label": "Filter tensors" });
  const grid = new Grid({ label: "Tensors", columns: tensorColumns(false), key: (row) => row.name, empty: "No tensor has that name." });
  let shown = [];
  const filtered = () => grid.set(shown.filter((row) => row.name.includes(filter.value)));
  filter.addEventListener("input", filtered);

  const head = () => {
    const row = state.rows.get(store)?.get(path);
    if (!row) return;
    const problems = [...row.problems, ...row.waiting];
    put(top, [
      h("div", { class: "title" }, h("h1", {}, row.step === null ? row.name : `Step ${row.step}`), stateChip(row), dots(row, Boolean(state.stores[store]?.report?.peers))),
      h("p", { class: "muted path" }, row.name),
      problems.length ? h("ul", { class: "card problem" }, problems.map((text) => h("li", {}, text))) : null,
      facts([["Saved", time(row.created)], ["Level", row.level ?? "–"], ["Size", bytes(row.size)], ["Stored", bytes(row.stored)], ["Shared", bytes(row.shared)],
        ["Freed if pruned", bytes(row.freed)], ["Tensors", row.tensors ?? "–"], ["Files", row.files], ["Format", row.format], ["Kind", row.kind], ["Logged steps", row.logged_steps || null],
        ["Pinned", row.pinned ? "yes" : null], ["Kept because", row.reasons.join(", ") || null],
        ...Object.entries(row.metrics).map(([name, value]) => [name, number(value)])]),
    ]);
  };
  const load = async (codecs) => {
    coding.disabled = true;
    try {
      const found = await work("/api/checkpoint.json", { store, path, codecs: codecs ? 1 : 0 }, (job) => put(below, [meter(progressText(job, codecs ? "Reading how chunks are encoded" : "Reading the metadata"))]), () => isOpen);
      if (!found) return;
      shown = [...found.tensors.map((row) => ({ ...row, count: row.shards })), ...found.objects.map((row) => ({ ...row, dtype: "object", shape: null, count: null }))];
      grid.columns = tensorColumns(codecs);
      grid.heads();
      filtered();
      coding.hidden = codecs;
      coding.disabled = false;
      put(below, [h("div", { class: "title" }, h("h2", {}, "Tensors"), h("span", { class: "muted" }, `${count(found.tensors.length, "tensor")}, ${count(found.objects.length, "object")} in ${count(found.files.length, "file")}`),
        h("div", { class: "spring" }), filter, coding), grid.whole,
        h("h2", {}, "Commands"), command(`tierfs checkpoint verify ${quoted(found.url)}`), command(`tierfs checkpoint export ${quoted(found.url)} model.safetensors`)]);
    } catch (error) {
      if (isOpen) put(below, [problem(error)]);
    }
  };
  coding.addEventListener("click", () => load(true));
  state.listeners.add((what, number) => { if (what === "rows" && number === store) head(); });
  head();
  put(below, [meter("Reading the metadata …")]);
  load(false);
  const element = h("div", {}, back(), top, h("p", {}, h("a", { href: address("files", { path }) }, "Its files")), below);
  return { element, title: path, close: () => { isOpen = false; } };
}

export const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);

function tensorColumns(codecs) {
  const ratio = (row) => (row.stored === undefined || !row.size ? null : row.stored / row.size);
  return [
    { id: "name", title: "Name", width: "minmax(160px, 4fr)", cell: (row) => h("span", { class: "name", title: row.name }, row.name), sort: (row) => row.name },
    { id: "dtype", title: "Type", width: "minmax(72px, .8fr)", cell: (row) => row.dtype, sort: (row) => row.dtype },
    { id: "shape", title: "Shape", width: "minmax(110px, 1.2fr)", cell: (row) => row.shape?.join(" × ") || "–", wide: true },
    { id: "size", title: "Size", width: "minmax(76px, .8fr)", cell: (row) => bytes(row.size), sort: (row) => row.size, right: true },
    { id: "shards", title: "Shards", width: "minmax(60px, .6fr)", cell: (row) => row.count ?? "–", sort: (row) => row.count, right: true, wide: true },
    ...(codecs ? [
      { id: "stored", title: "Stored", width: "minmax(76px, .8fr)", cell: (row) => bytes(row.stored), sort: (row) => row.stored, right: true, wide: true },
      { id: "ratio", title: "Of raw", width: "minmax(70px, .7fr)", cell: (row) => (ratio(row) === null ? "–" : `${(100 * ratio(row)).toFixed(0)} %`), sort: ratio, right: true, wide: true },
      { id: "codec", title: "Codec", width: "minmax(90px, 1fr)", cell: (row) => h("span", { title: Object.keys(row.reasons ?? {}).join(", ") }, Object.keys(row.codecs ?? {}).join(" + ") || "–"), wide: true },
    ] : []),
  ];
}

export function diffView({ store, parameters }) {
  const a = parameters.get("a"), b = parameters.get("b");
  let isOpen = true;
  const below = h("div", {}, meter("Comparing …"));
  const title = h("h1");
  const step = (path) => state.rows.get(store)?.get(path)?.step ?? path;
  const name = () => put(title, [`Step ${step(a)} → ${step(b)}`]);
  state.listeners.add(name);
  name();
  work("/api/diff.json", { store, a, b }, (job) => put(below, [meter(job.total ? `Comparing: ${bytes(job.done)} of ${bytes(job.total)}` : "Comparing …")]), () => isOpen)
    .then((found) => { if (found) put(below, drawDiff(found)); })
    .catch((error) => { if (isOpen) put(below, [problem(error)]); });
  const element = h("div", {}, back(), h("div", { class: "title" }, title), below);
  return { element, title: `${a} → ${b}`, close: () => { isOpen = false; } };
}

function drawDiff(found) {
  const differing = found.tensors.reduce((total, one) => total + one.differing, 0), elements = found.tensors.reduce((total, one) => total + one.elements, 0);
  const notFinite = found.tensors.reduce((total, one) => total + one.not_finite, 0);
  const grid = new Grid({
    label: "Tensors that differ", key: (row) => row.name, empty: found.equal ? "Both checkpoints are equal, bit for bit." : "No tensor differs in its elements.",
    columns: [
      { id: "name", title: "Name", width: "minmax(160px, 4fr)", cell: (row) => h("span", { class: "name", title: row.name }, row.name), sort: (row) => row.name },
      { id: "relative", title: "Relative L2", width: "minmax(96px, 1fr)", cell: (row) => number(row.relative), sort: (row) => row.relative, right: true },
      { id: "share", title: "Changed", width: "minmax(80px, .9fr)", cell: (row) => `${(100 * row.fraction).toFixed(row.fraction < 0.1 ? 2 : 0)} %`, sort: (row) => row.fraction, right: true },
      { id: "max", title: "Largest", width: "minmax(90px, 1fr)", cell: (row) => number(row.max_abs), sort: (row) => row.max_abs, right: true, wide: true },
      { id: "elements", title: "Elements", width: "minmax(90px, 1fr)", cell: (row) => row.elements.toLocaleString("en"), sort: (row) => row.elements, right: true, wide: true },
      { id: "finite", title: "NaN or Inf", width: "minmax(84px, .8fr)", cell: (row) => (row.not_finite ? h("span", { class: "bad" }, row.not_finite) : "–"), sort: (row) => row.not_finite, right: true, wide: true },
    ],
  });
  const sorted = [...found.tensors].sort((one, other) => (other.relative ?? Infinity) - (one.relative ?? Infinity));
  grid.set(sorted);
  const names = (title, list) => (list.length ? h("details", { class: "card" }, h("summary", {}, `${title}: ${list.length}`), h("ul", {}, list.map((name) => h("li", {}, name)))) : null);
  return [
    facts([["Equal", found.equal_count], ["Tensors that differ", found.tensors.length], ["Elements changed", elements ? `${((100 * differing) / elements).toFixed(1)} %` : null],
      ["NaN or Inf", h("span", { class: notFinite ? "bad" : null }, notFinite)], ["Objects that differ", found.objects.length]]),
    strip(found.tensors, (name) => grid.set(name ? sorted.filter((row) => row.name.startsWith(name)) : sorted)),
    names("Only in the first", found.only_a), names("Only in the second", found.only_b),
    names("Of another type or shape", found.unlike.map((one) => `${one.name}: ${one.a} → ${one.b}`)), names("Objects that differ", found.objects),
    h("h2", {}, "Tensors that differ"), grid.whole,
  ];
}

// A strip over the layers for each group of tensors: the darker, the larger the relative norm, by orders of magnitude.
function strip(tensors, choose) {
  const groups = new Map();
  for (const tensor of tensors) {
    const at = layerOf(tensor.name);
    if (!at) continue;
    const group = groups.get(at.group) ?? new Map();
    const cell = group.get(at.index) ?? { relative: 0, count: 0, bad: 0 };
    group.set(at.index, { relative: Math.max(cell.relative, Number(tensor.relative ?? 0)), count: cell.count + 1, bad: cell.bad + tensor.not_finite });
    groups.set(at.group, group);
  }
  if (!groups.size) return null;
  const known = [...groups.values()].flatMap((group) => [...group.values()]).map((cell) => cell.relative).filter((value) => value && Number.isFinite(value));
  const high = Math.log10(Math.max(...known, 1e-12)), low = Math.min(high - 1, Math.log10(Math.min(...known, 1e12)));
  const tone = (value) => (value ? Math.round(12 + 88 * Math.min(1, Math.max(0, (Math.log10(value) - low) / (high - low)))) : 0);
  let chosen = null;
  const lines = [...groups].map(([name, group]) => h("div", { class: "strip" }, h("span", { class: "name", title: name }, name),
    h("div", { class: "cells" }, [...group].sort(([one], [other]) => one - other).map(([index, cell]) => {
      const prefix = `${name}.${index}.`;
      const text = `${name}.${index}: relative ${number(cell.relative)} in ${count(cell.count, "tensor")}${cell.bad ? `, ${cell.bad} NaN or Inf` : ""}`;
      const button = h("button", { type: "button", class: cell.bad ? "cell bad" : "cell", title: text, "aria-label": text, "aria-pressed": "false", vars: { "--tone": `${tone(cell.relative)}%` } });
      button.addEventListener("click", () => {
        chosen?.setAttribute("aria-pressed", "false");
        chosen = chosen === button ? null : button;
        chosen?.setAttribute("aria-pressed", "true");
        choose(chosen && prefix);
      });
      return button;
    }))));
  return h("section", { class: "card" }, h("h2", {}, "By layer"),
    h("p", { class: "muted" }, `Relative L2 from ${(10 ** low).toPrecision(2)} (light) to ${(10 ** high).toPrecision(2)} (dark). Choose a layer to list its tensors.`), lines);
}

// A browser of files, with previews.

import { address, go, state } from "./app.js";
import { ask, bytes, count, h, meter, problem, put, time } from "./dom.js";
import { Grid } from "./grid.js";

export const fileColumns = [
  { id: "name", title: "Name", width: "minmax(150px, 4fr)", cell: (row) => h("span", { class: "name", title: row.name }, row.type === "directory" ? `${row.name}/` : row.name), sort: (row) => row.name },
  { id: "size", title: "Size", width: "minmax(80px, 1fr)", cell: (row) => (row.type === "directory" ? "–" : bytes(row.size)), sort: (row) => row.size, right: true },
  { id: "level", title: "Level", width: "minmax(70px, .8fr)", cell: (row) => (row.foreign ? "foreign" : row.level ?? "–"), sort: (row) => row.level },
  { id: "modified", title: "Changed", width: "minmax(120px, 1fr)", cell: (row) => time(row.modified), sort: (row) => row.modified, wide: true },
];

export function filesView({ store, parameters }) {
  const wanted = parameters.get("path");
  const crumbs = h("nav", { class: "crumbs", "aria-label": "Directories" }), below = h("div", {}, meter("Reading the directory …")), look = h("div", { "aria-live": "polite" });
  const grid = new Grid({
    label: "Files", key: (row) => row.path, empty: "Nothing is here.", height: 480,
    open: (row) => (row.type === "directory" ? go("files", { path: row.path }) : preview(row)),
    columns: fileColumns,
  });
  const preview = async (row) => {
    put(look, [meter("Reading the file …")]);
    const link = state.about.allow_download ? h("a", { class: "button", href: `/download?${new URLSearchParams({ store, path: row.path })}`, download: true }, "Download") : null;
    const title = h("div", { class: "title" }, h("h2", {}, row.name), h("span", { class: "muted" }, bytes(row.size)), h("div", { class: "spring" }), link);
    try {
      const { document: found } = await ask("/api/preview.json", { store, path: row.path });
      put(look, [title, drawPreview(found)]);
    } catch (error) {
      put(look, [title, problem(error)]);
    }
  };
  ask("/api/files.json", { store, path: wanted ?? undefined }).then(({ document: found }) => {
    const root = state.stores[store].url, parts = found.path ? found.path.split("/") : [];
    const above = parts.map((name, index) => ({ name, path: parts.slice(0, index + 1).join("/") })).filter(({ path }) => root.endsWith(path) || found.path.startsWith(path));
    put(crumbs, [h("a", { href: address("files") }, root.split("/").at(-1) || root), above.map(({ name, path }) => [" / ", h("a", { href: address("files", { path }), "aria-current": path === found.path ? "page" : null }, name)])]);
    grid.set(found.entries);
    put(below, [grid.whole, found.left_out ? h("p", { class: "muted" }, `${count(found.left_out, "more entry")} not shown: use tierfs ls.`) : null]);
  }).catch((error) => put(below, [problem(error)]));
  return { element: h("div", {}, h("h1", {}, "Files"), crumbs, below, look), title: wanted || "Files" };
}

function drawPreview(found) {
  if (found.kind === "binary") return h("p", { class: "card muted" }, "This is not text. Nothing of it is shown.");
  if (found.kind === "text") {
    let text = found.text;
    if (found.is_whole && text.startsWith("{")) try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON: as it is */ }
    return [h("pre", { class: "card", tabindex: 0, role: "region", "aria-label": "Content" }, text), found.is_whole ? null : h("p", { class: "muted" }, "The rest is not shown.")];
  }
  const grid = new Grid({
    label: "Tensors in the file", key: (row) => row.name, height: 400, empty: "The file has no tensor.",
    columns: [
      { id: "name", title: "Name", width: "minmax(150px, 4fr)", cell: (row) => h("span", { class: "name", title: row.name }, row.name), sort: (row) => row.name },
      { id: "dtype", title: "Type", width: "minmax(60px, .6fr)", cell: (row) => row.dtype, sort: (row) => row.dtype },
      { id: "shape", title: "Shape", width: "minmax(100px, 1fr)", cell: (row) => row.shape.join(" × ") || "–", wide: true },
      { id: "size", title: "Size", width: "minmax(80px, 1fr)", cell: (row) => bytes(row.size), sort: (row) => row.size, right: true },
      { id: "at", title: "Offset", width: "minmax(90px, 1fr)", cell: (row) => row.at.toLocaleString("en"), sort: (row) => row.at, right: true, wide: true },
    ],
  });
  grid.set(found.tensors);
  return grid.whole;
}

// A table of any length: only the rows in sight exist. Arrow keys move, Enter opens, Space picks.

import { h, put } from "./dom.js";

const ROW = 40, SPARE = 8;

export class Grid {
  // columns: {id, title, width, cell(row), sort(row)?, right?, wide?}; wide ones need a wide window.
  constructor({ label, columns, key, open, pick, empty, height = 640 }) {
    Object.assign(this, { columns, key, open, pick, height });
    this.rows = [];
    this.picked = new Set();
    this.active = 0;
    this.order = null;
    this.shown = new Map();
    this.head = h("div", { role: "row", class: "head" });
    this.space = h("div", { class: "space", role: "presentation" });
    this.body = h("div", { class: "body", role: "rowgroup" }, this.space);
    this.element = h("div", { class: "grid", role: "grid", "aria-label": label, "aria-multiselectable": pick ? "true" : null },
      h("div", { role: "rowgroup", class: "heads" }, this.head), this.body);
    this.empty = h("p", { class: "empty", hidden: true }, empty);
    this.whole = h("div", {}, this.element, this.empty);
    this.body.addEventListener("scroll", () => this.draw(), { passive: true });
    this.body.addEventListener("keydown", (event) => this.press(event));
    this.body.addEventListener("click", (event) => this.click(event));
    this.heads();
  }

  heads() {
    this.element.style.setProperty("--columns", this.columns.map((column) => column.width).join(" "));
    this.element.style.setProperty("--narrow", this.columns.filter((column) => !column.wide).map((column) => column.width).join(" "));
    put(this.head, this.columns.map((column) => {
      const state = this.order?.id === column.id ? (this.order.up ? "ascending" : "descending") : column.sort ? "none" : null;
      const head = h("div", { role: "columnheader", class: this.look(column), "aria-sort": state });
      put(head, column.sort
        ? h("button", { type: "button", class: "sort", onclick: () => this.sortBy(column) }, column.title, state === "ascending" ? " ↑" : state === "descending" ? " ↓" : "")
        : column.title || h("span", { class: "hidden" }, column.id));
      return head;
    }));
  }

  look(column) {
    return [column.right && "right", column.wide && "wide"].filter(Boolean).join(" ") || null;
  }

  sortBy(column) {
    this.order = this.order?.id === column.id ? (this.order.up ? null : { id: column.id, up: true }) : { id: column.id, up: false };
    this.heads();
    this.set(this.all);
    this.body.scrollTop = 0;
  }

  set(rows) {
    this.all = rows;
    const column = this.order && this.columns.find((one) => one.id === this.order.id);
    this.rows = rows;
    if (column) {
      const sign = this.order.up ? 1 : -1;
      const keyed = rows.map((row) => [column.sort(row), row]);
      keyed.sort(([a], [b]) => (a === b ? 0 : a === null || a === undefined ? 1 : b === null || b === undefined ? -1 : a < b ? -sign : sign));
      this.rows = keyed.map(([, row]) => row);
    }
    this.active = Math.min(this.active, Math.max(0, this.rows.length - 1));
    this.element.setAttribute("aria-rowcount", this.rows.length + 1);
    this.space.style.setProperty("height", `${this.rows.length * ROW}px`);
    this.body.style.setProperty("height", `${Math.min(this.rows.length * ROW, this.height)}px`);
    this.empty.hidden = this.rows.length > 0;
    this.element.hidden = this.rows.length === 0;
    this.draw(true);
  }

  draw(again = false) {
    const first = Math.max(0, Math.floor(this.body.scrollTop / ROW) - SPARE);
    const last = Math.min(this.rows.length, Math.ceil((this.body.scrollTop + Math.min(this.height, this.rows.length * ROW)) / ROW) + SPARE);
    const focused = this.body.contains(document.activeElement) && document.activeElement !== this.body;
    for (const [index, line] of this.shown)
      if (index < first || index >= last || (again && line.row !== this.rows[index])) {
        line.element.remove();
        this.shown.delete(index);
      }
    for (let index = first; index < last; index += 1) {
      let line = this.shown.get(index);
      if (!line) {
        line = { row: this.rows[index], element: this.line(index) };
        this.shown.set(index, line);
        this.space.append(line.element);
      }
      line.element.tabIndex = index === this.active ? 0 : -1;
      if (this.pick) line.element.setAttribute("aria-selected", this.picked.has(this.key(line.row)));
    }
    const active = this.shown.get(this.active)?.element;
    if (focused && active && document.activeElement === document.body) active.focus({ preventScroll: true });
    if (!active && this.shown.size) this.shown.get(first).element.tabIndex = 0;
  }

  line(index) {
    const row = this.rows[index];
    const element = h("div", { role: "row", class: "line", "aria-rowindex": index + 2, vars: { top: `${index * ROW}px` } },
      this.columns.map((column) => h("div", { role: "gridcell", class: this.look(column) }, column.cell(row))));
    element.dataset.index = index;
    return element;
  }

  choose(index) {
    const key = this.key(this.rows[index]);
    if (!this.picked.delete(key)) this.picked.add(key);
    while (this.picked.size > 2) this.picked.delete(this.picked.values().next().value);
    this.draw();
    this.pick(this.picked);
  }

  click(event) {
    const line = event.target.closest(".line");
    if (!line) return;
    this.active = Number(line.dataset.index);
    this.draw();
    if (this.pick && (event.target.closest(".pickbox") || event.ctrlKey || event.metaKey)) this.choose(this.active);
    else this.open?.(this.rows[this.active]);
  }

  press(event) {
    const page = Math.floor(this.height / ROW) - 1;
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves && this.rows.length) {
      event.preventDefault();
      this.active = Math.max(0, Math.min(this.rows.length - 1, this.active + moves[event.key]));
      const top = this.active * ROW, seen = Math.min(this.height, this.rows.length * ROW);
      if (top < this.body.scrollTop) this.body.scrollTop = top;
      if (top + ROW > this.body.scrollTop + seen) this.body.scrollTop = top + ROW - seen;
      this.draw();
      this.shown.get(this.active)?.element.focus({ preventScroll: true });
    } else if (event.key === "Enter") this.open?.(this.rows[this.active]);
    else if (event.key === " " && this.pick) {
      event.preventDefault();
      this.choose(this.active);
    }
  }
}

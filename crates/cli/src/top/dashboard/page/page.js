// The page of `farfield top --serve`. It shows the rows that /events sends, changes only what has
// changed, and asks for the last hour and for details when somebody looks at them. All texts are
// set as text, so no name can become markup; the Content-Security-Policy forbids anything else.
"use strict";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const HOUR_MS = 3600e3;
const SPAN_MS_MIN = 300e3;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Sets a text if it is another one, so that nothing is drawn or read aloud again.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// ---- numbers as people read them ----

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${unit === 0 ? count : count.toFixed(1)} ${units[unit]}`;
}

function compact(count) {
  const units = ["", "k", "M", "G", "T"];
  let unit = 0;
  while (count >= 1e4 && unit < units.length - 1) { count /= 1e3; unit += 1; }
  return `${unit === 0 ? Math.round(count * 10) / 10 : count.toFixed(1)}${units[unit]}`;
}

function time(ns) {
  if (!ns) return "–";
  if (ns < 1e3) return `${ns} ns`;
  if (ns < 1e6) return `${(ns / 1e3).toFixed(1)} µs`;
  if (ns < 1e9) return `${(ns / 1e6).toFixed(1)} ms`;
  return `${(ns / 1e9).toFixed(1)} s`;
}

// ---- what is known ----

const rows = new Map(); // identifier → row
const level = (row) => row.findings.reduce((worst, it) => Math.max(worst, LEVELS.indexOf(it.level)), 0);
const LEVELS = ["ok", "warn", "fail"];
const isFarFrom = (row) => row.near + row.far > 0 ? row.far / (row.near + row.far) : 0;

// A column: label, what it sorts by, what it shows. Without `show`, the sort value is text.
const isNumber = (column) => /^number/.test(column.className);
const number = (label, value, show) => ({ label, value, show: (row) => show(value(row)), className: "number" });
const NAME = { label: "Name", value: (row) => row.name, className: "name" };
const STATE = { label: "State", value: (row) => row.state, rank: (row) => -level(row), className: "state" };
const MACHINE = { label: "Machine", value: (row) => row.machine, className: "long of-machine" };
const NEAR = {
  label: "Near", value: (row) => row.near, className: "number wide",
  show: (row) => `${bytes(row.near)} of ${bytes(row.limit)}`, share: (row) => row.limit ? row.near / row.limit : 0,
};
const COLUMNS = {
  job: [
    { ...NAME, label: "Job", show: (row) => `${row.pid}  ${row.name}` }, STATE, MACHINE, NEAR,
    number("Far", (row) => row.far, bytes),
    number("Of it far", isFarFrom, (share) => `${Math.round(share * 100)} %`),
    number("Faults/s", (row) => row.faults, compact),
    number("Median", (row) => row.p50 ?? 0, time),
    number("p99", (row) => row.p99 ?? 0, time),
    { label: "Pool", value: (row) => row.pool, className: "long" },
  ],
  heap: [
    { ...NAME, label: "Heap", show: (row) => `${row.name}  ${row.pid}  ${row.command}` }, STATE, MACHINE, NEAR,
    number("Misses/s", (row) => row.misses, compact),
    number("Fetched/s", (row) => row.fetched, bytes),
    { label: "Plane", value: (row) => row.plane, className: "long" },
  ],
  server: [
    { ...NAME, label: "Server" }, STATE, MACHINE,
    {
      label: "Used", value: (row) => row.used, className: "number wide",
      show: (row) => row.capacity ? `${bytes(row.used)} of ${bytes(row.capacity)}` : bytes(row.used),
      share: (row) => row.capacity ? row.used / row.capacity : 0,
    },
    number("Jobs", (row) => row.jobs, String),
    number("Connections", (row) => row.connections, compact),
    number("Reads/s", (row) => row.reads, compact),
    number("Writes/s", (row) => row.writes, compact),
  ],
  tenant: [
    { ...NAME, label: "Tenant" }, STATE,
    {
      label: "Used", value: (row) => row.used, className: "number wide",
      show: (row) => row.quota ? `${bytes(row.used)} of ${bytes(row.quota)}` : bytes(row.used),
      share: (row) => row.quota ? row.used / row.quota : 0,
    },
    { label: "Server", value: (row) => row.server, className: "long" },
  ],
  machine: [
    { ...NAME, label: "Machine" }, STATE,
    { label: "Dashboard", value: (row) => row.url, className: "long" },
    number("Jobs", (row) => row.jobs, String),
    number("Near", (row) => row.near, bytes),
    number("Far", (row) => row.far, bytes),
    number("Faults/s", (row) => row.faults, compact),
  ],
};

// ---- tables ----

// Lines of a table that are drawn at first; the rest comes when somebody wants it.
const LINES_SHOWN = 200;

class RowTable {
  constructor(kind, id) {
    this.kind = kind;
    this.id = id;
    this.columns = COLUMNS[kind];
    this.lines = new Map(); // identifier → { row, text, line, cells, isStale }
    this.most = LINES_SHOWN;
    this.sorted = { column: this.columns[1], down: false };
    this.order = [];
    const table = $(id);
    table.setAttribute("role", "table");
    const head = table.createTHead().insertRow();
    head.setAttribute("role", "row");
    this.heads = this.columns.map((column) => {
      const cell = element("th", undefined, column.className);
      cell.scope = "col";
      cell.setAttribute("role", "columnheader");
      const button = element("button", column.label);
      button.type = "button";
      button.addEventListener("click", () => this.sortBy(column));
      cell.append(button);
      head.append(cell);
      return cell;
    });
    this.body = table.createTBody();
    this.body.setAttribute("role", "rowgroup");
    this.body.addEventListener("keydown", (event) => this.onKey(event));
    this.body.addEventListener("click", (event) => {
      const line = event.target.closest("tr");
      if (line) openDetails(line.dataset.id);
    });
    this.more = element("button", undefined, "more");
    this.more.type = "button";
    this.more.hidden = true;
    this.more.addEventListener("click", () => { this.most = Infinity; this.arrange(); });
    table.after(this.more);
    this.showSort();
  }

  sortBy(column) {
    const isSame = this.sorted.column === column;
    this.sorted = { column, down: isSame ? !this.sorted.down : isNumber(column) };
    this.showSort();
    this.arrange();
  }

  showSort() {
    this.columns.forEach((column, index) => {
      const direction = this.sorted.down ? "descending" : "ascending";
      this.heads[index].setAttribute("aria-sort", column === this.sorted.column ? direction : "none");
    });
  }

  set(id, row) {
    let entry = this.lines.get(id);
    if (!entry) this.lines.set(id, entry = { id, line: null });
    entry.row = row;
    entry.text = this.columns.map((column) => String(column.value(row))).concat(row.pid ?? "").join(" ").toLowerCase();
    entry.isStale = true;
    if (entry.line?.isConnected) this.draw(entry);
  }

  // Makes the line of a row.
  makeLine(entry) {
    entry.line = element("tr");
    entry.line.dataset.id = entry.id;
    entry.line.setAttribute("role", "row");
    entry.cells = this.columns.map((column) => {
      const cell = element("td", undefined, column.className);
      cell.setAttribute("role", "cell");
      cell.dataset.label = column.label;
      const content = element(column === this.columns[0] ? "button" : "span");
      if (content.type) { content.type = "button"; content.tabIndex = -1; }
      cell.append(content);
      if (column.share) cell.append(element("span", undefined, "bar"));
      if (column.share) cell.lastChild.append(element("i"));
      return cell;
    });
    entry.line.append(...entry.cells);
  }

  // Brings the line of a row up to date.
  draw(entry) {
    if (!entry.line) this.makeLine(entry);
    if (!entry.isStale) return;
    entry.isStale = false;
    const row = entry.row;
    this.columns.forEach((column, index) => {
      const cell = entry.cells[index];
      const text = column.show ? column.show(row) : String(column.value(row));
      setText(cell.firstChild, text);
      if (column.share) cell.lastChild.firstChild.style.width = `${Math.min(100, 100 * column.share(row))}%`;
      if (!isNumber(column) && cell.title !== text) cell.title = text;
      if (column === STATE) cell.className = `state is-${row.state === "ended" ? "ended" : LEVELS[level(row)]}`;
    });
  }

  delete(id) {
    this.lines.get(id)?.line?.remove();
    this.lines.delete(id);
  }

  // Brings the lines into order and hides those that the filter leaves out. Moves no line that is right.
  arrange() {
    const words = $("filter").value.toLowerCase().split(/\s+/).filter((word) => word);
    const { column, down } = this.sorted;
    const key = column.rank ?? column.value;
    const shown = [...this.lines.values()].filter((it) => words.every((word) => it.text.includes(word)));
    const compare = (a, b) => {
      const [x, y] = [key(a.row), key(b.row)];
      const order = x < y ? -1 : x > y ? 1 : 0;
      return (down ? -order : order) || a.row.pid - b.row.pid || (a.text < b.text ? -1 : 1);
    };
    shown.sort(compare);
    const matches = shown.length;
    shown.length = Math.min(matches, this.most);
    shown.forEach((it) => this.draw(it));
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    const keep = new Set(shown.map((it) => it.line));
    for (const line of [...this.body.children]) if (!keep.has(line)) line.remove();
    let next = this.body.firstChild;
    for (const { line } of shown) {
      if (line === next) next = next.nextSibling;
      else this.body.insertBefore(line, next);
    }
    this.order = shown;
    if (focused && document.activeElement !== focused && focused.isConnected) focused.focus({ preventScroll: true });
    this.keepOneTabStop();
    const all = this.lines.size;
    setText($(`${this.id}-count`), matches < all ? `${matches} of ${all}` : String(all));
    this.more.hidden = matches === shown.length;
    setText(this.more, `Show all ${matches}`);
    const section = $(`${this.id}-section`);
    if (section) section.hidden = all === 0 || (this.kind === "machine" && all < 2);
  }

  // Tab stops at one row of a table; the arrows go on from there.
  keepOneTabStop(chosen) {
    const buttons = this.order.map((it) => it.cells[0].firstChild);
    const stop = chosen ?? buttons.find((it) => it === document.activeElement) ?? buttons.find((it) => it.tabIndex === 0)
      ?? buttons[0];
    for (const button of buttons) {
      const wanted = button === stop ? 0 : -1;
      if (button.tabIndex !== wanted) button.tabIndex = wanted;
    }
  }

  onKey(event) {
    if (this.order.length === this.most && ["ArrowDown", "PageDown", "End"].includes(event.key)
      && this.order[this.most - 1].line.contains(event.target)) { this.most += LINES_SHOWN; this.arrange(); }
    const at = this.order.findIndex((it) => it.line.contains(event.target));
    const last = this.order.length - 1;
    const target = {
      ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last, PageDown: at + 20, PageUp: at - 20,
    }[event.key];
    if (target === undefined || at < 0) return;
    event.preventDefault();
    const button = this.order[Math.max(0, Math.min(last, target))].cells[0].firstChild;
    this.keepOneTabStop(button);
    button.focus();
  }
}

const tables = {
  job: new RowTable("job", "jobs"), heap: new RowTable("heap", "heaps"),
  server: new RowTable("server", "servers"), tenant: new RowTable("tenant", "tenants"), machine: new RowTable("machine", "machines"),
};

// ---- what to do ----

const ADVICE_MAX = 20;

function finding(row, id, it) {
  const item = element("li", undefined, it.level);
  if (id) {
    const button = element("button", `${row.pid ? `${row.pid} ` : ""}${row.name}`);
    button.type = "button";
    button.addEventListener("click", () => openDetails(id));
    item.append(button);
  }
  item.append(element("p", `${it.check}: ${it.found}`), element("p", it.advice, "advice"));
  return item;
}

let adviceShown = "";

function showAdvice() {
  const all = [];
  for (const [id, row] of rows) {
    for (const it of row.findings) if (it.level !== "ok") all.push({ id, row, it });
  }
  all.sort((a, b) => LEVELS.indexOf(b.it.level) - LEVELS.indexOf(a.it.level) || (a.id < b.id ? -1 : 1));
  $("advice-section").hidden = all.length === 0;
  const kept = all.slice(0, ADVICE_MAX);
  const shown = JSON.stringify([all.length, kept.map(({ id, it }) => [id, it])]);
  if (shown === adviceShown || $("advice").contains(document.activeElement)) return;
  adviceShown = shown;
  $("advice").replaceChildren(...kept.map(({ id, row, it }) => finding(row, id, it)));
  if (all.length > kept.length) $("advice").append(element("li", `and ${all.length - kept.length} more, in the tables`));
}

// ---- the last hour ----

// A plot of one or two lines over the last hour. `pick` takes values out of a sample.
class HourPlot {
  constructor(parent, label, names, picks, show) {
    Object.assign(this, { label, names, picks, show });
    this.figure = element("figure");
    this.caption = element("figcaption");
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", "0 0 720 100");
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.lines = names.map((_, index) => {
      const line = document.createElementNS(SVG, "path");
      line.setAttribute("class", index === 0 ? "first" : "second");
      this.svg.append(line);
      return line;
    });
    this.figure.append(this.caption, this.svg);
    parent.append(this.figure);
  }

  draw(samples, now, everyMs) {
    const recent = samples.filter((sample) => sample[0] > now - HOUR_MS);
    const spanMs = Math.min(HOUR_MS, Math.max(SPAN_MS_MIN, now - (recent[0]?.[0] ?? now)));
    const most = Math.max(1e-9, ...recent.flatMap((sample) => this.picks.map((pick) => pick(sample))));
    this.picks.forEach((pick, index) => {
      let before = -Infinity;
      const steps = recent.map((sample) => {
        const step = sample[0] - before > 3 * everyMs ? "M" : "L";
        before = sample[0];
        return `${step}${(720 * (1 - (now - sample[0]) / spanMs)).toFixed(1)} ${(98 - 96 * pick(sample) / most).toFixed(1)}`;
      });
      this.lines[index].setAttribute("d", steps.join(""));
    });
    const last = recent[recent.length - 1];
    const parts = this.names.map((name, index) => `${name} ${last ? this.show(this.picks[index](last)) : "–"}`);
    const texts = [this.label, ...parts, `at most ${this.show(recent.length ? most : 0)} in ${Math.round(spanMs / 60e3)} min`];
    if (this.caption.childNodes.length === 0) {
      this.caption.append(...texts.map((_, index) => element(index === 0 ? "b" : "span", undefined,
        index === 1 ? "key-first" : index === 2 && this.names.length > 1 ? "key-second" : "")));
    }
    texts.forEach((text, index) => setText(this.caption.childNodes[index], text));
    this.svg.setAttribute("aria-label", `${texts.join(", ")}`);
  }
}

class Hour {
  constructor(parent, id) {
    this.id = id;
    this.samples = [];
    this.plots = [
      new HourPlot(parent, "Memory", ["near", "far"], [(it) => it[1], (it) => it[2]], bytes),
      new HourPlot(parent, "Faults", ["per second"], [(it) => it[3]], compact),
      new HourPlot(parent, "Latency", ["median", "p99"], [(it) => it[4], (it) => it[5]], time),
    ];
  }

  async refresh() {
    const since = this.samples.length ? this.samples[this.samples.length - 1][0] : 0;
    const part = await ask(`/api/history?id=${this.id}&since=${since}`);
    this.samples = this.samples.concat(part.samples).slice(-720);
    this.plots.forEach((plot) => plot.draw(this.samples, Date.now(), part.every_ms));
  }
}

async function ask(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}

// ---- details of one row ----

const details = { id: null, hour: null, opener: null };

function openDetails(id) {
  const row = rows.get(id);
  if (!row || details.id) return;
  details.id = id;
  details.opener = id;
  $("details-hour").replaceChildren();
  $("facts").replaceChildren();
  $("parts").replaceChildren();
  setText($("changed"), "");
  details.hour = row.kind === "job" ? new Hour($("details-hour"), id) : null;
  $("change").hidden = !(about.changes && row.kind === "job" && row.is_here);
  showDetails();
  $("details").showModal();
  $("close").focus();
  refreshDetails();
}

$("details").addEventListener("close", () => {
  const line = tables[rows.get(details.opener)?.kind]?.lines.get(details.opener)?.line;
  details.id = null;
  details.hour = null;
  line?.querySelector("button").focus();
});

function showDetails() {
  const row = rows.get(details.id);
  if (!row) { setText($("details-title"), `${$("details-title").textContent.replace(/ \(gone\)$/, "")} (gone)`); return; }
  setText($("details-title"), `${row.pid ? `${row.pid}  ` : ""}${row.name}`);
  const shown = JSON.stringify(row.findings);
  if ($("details-advice").dataset.shown === shown) return;
  $("details-advice").dataset.shown = shown;
  $("details-advice").replaceChildren(...row.findings.map((it) => finding(row, null, it)));
}

function readable(name, value) {
  if (value === null) return "–";
  if (typeof value === "number") {
    if (/bytes/.test(name)) return name.endsWith("_per_s") ? `${bytes(value)}/s` : bytes(value);
    if (/_ns(_|$)/.test(name)) return time(value);
    if (/_ms$/.test(name)) return time(value * 1e6);
    if (/(_share|accuracy)$/.test(name)) return `${Math.round(value * 100)} %`;
    return compact(value);
  }
  return String(value);
}

// The values say their unit.
function labelOf(name) {
  return name.replace(/_(bytes|ns|ms)(?=_|$)/, "").replaceAll("_", " ");
}

// Flattens an object into facts, and its lists of objects into tables.
function facts(object, prefix, into) {
  for (const [name, value] of Object.entries(object)) {
    if (Array.isArray(value) && value.some((it) => it && typeof it === "object")) into.parts.push([prefix + name, value]);
    else if (Array.isArray(value)) { if (value.length) into.facts.push([prefix + name, value.join(" ")]); }
    else if (value && typeof value === "object") facts(value, name === "counters" ? "" : `${name}.`, into);
    else into.facts.push([prefix + name, readable(name, value)]);
  }
  return into;
}

function partTable([name, list]) {
  const columns = [...new Set(list.flatMap((it) => Object.keys(it)))];
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const column of columns) {
    const cell = element("th", labelOf(column));
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const it of list.slice(0, 200)) {
    const line = body.insertRow();
    for (const column of columns) {
      const cell = element("td", readable(column, it[column] ?? null));
      cell.dataset.label = labelOf(column);
      line.append(cell);
    }
  }
  return [element("h3", labelOf(name)), table];
}

async function refreshDetails() {
  const id = details.id;
  if (!id) return;
  try {
    const row = rows.get(id);
    if (row && row.kind !== "machine" && row.kind !== "tenant") {
      const all = facts(await ask(`/api/row?id=${id}`), "", { facts: [], parts: [] });
      if (details.id !== id) return;
      const pairs = all.facts.map(([name, text]) => {
        const pair = element("div", undefined, text.length > 30 ? "long" : "");
        pair.append(element("dt", labelOf(name)), element("dd", text));
        return pair;
      });
      const top = $("details").scrollTop;
      $("facts").replaceChildren(...pairs);
      $("parts").replaceChildren(...all.parts.flatMap(partTable));
      $("details").scrollTop = top;
    }
    await details.hour?.refresh();
  } catch (error) {
    // The row is gone, or the dashboard is: the status line says which.
  }
}

async function change(path, body) {
  setText($("changed"), "…");
  try {
    const headers = { "Authorization": `Bearer ${$("token").value}`, "Content-Type": "application/json" };
    const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
    setText($("changed"), await response.text());
  } catch (error) {
    setText($("changed"), "the dashboard does not answer");
  }
}

$("change").addEventListener("submit", (event) => event.preventDefault());
$("set-near").addEventListener("click", () => change("/api/near", { pid: rows.get(details.id).pid, size: $("size").value }));
$("set-pool").addEventListener("click", () => change("/api/pool", { pid: rows.get(details.id).pid, url: $("pool").value }));

// ---- events ----

let about = { changes: false };
let source = null;
let arrangeAt = 0;

function take(message, isSnapshot) {
  const { rows: changed, gone } = JSON.parse(message);
  const removed = isSnapshot ? [...rows.keys()].filter((id) => !(id in changed)) : gone;
  for (const id of removed) {
    const row = rows.get(id);
    rows.delete(id);
    if (row) tables[row.kind].delete(id);
  }
  const hasNew = Object.keys(changed).some((id) => !rows.has(id));
  for (const [id, row] of Object.entries(changed)) {
    rows.set(id, row);
    tables[row.kind].set(id, row);
  }
  // Lines that change places every second cannot be read.
  const now = performance.now();
  if (isSnapshot || removed.length > 0 || hasNew || now > arrangeAt) {
    arrangeAt = now + 3000;
    Object.values(tables).forEach((table) => table.arrange());
  }
  showSum();
  showAdvice();
  if (details.id) showDetails();
}

function showSum() {
  document.body.classList.toggle("several", tables.machine.lines.size > 1);
  let [jobs, near, far, faults] = [0, 0, 0, 0];
  for (const row of rows.values()) {
    if (row.kind !== "machine") continue;
    jobs += row.jobs; near += row.near; far += row.far; faults += row.faults;
  }
  setText($("sum"), `${jobs} ${jobs === 1 ? "job" : "jobs"}, ${bytes(near)} near, ${bytes(far)} far, ${compact(faults)} faults/s`);
  $("jobs-empty").hidden = tables.job.lines.size > 0;
}

function setLink(text, isBroken) {
  setText($("link"), text);
  $("link").classList.toggle("broken", isBroken);
}

function connect() {
  source = new EventSource("/events");
  source.addEventListener("open", () => setLink("live", false));
  source.addEventListener("error", () => {
    setLink("no connection to the dashboard; what is shown is old", true);
    // A refusal (too many readers) ends the source for good.
    if (source.readyState === EventSource.CLOSED) setTimeout(() => { if (!document.hidden) connect(); }, 5000);
  });
  source.addEventListener("snapshot", (event) => take(event.data, true));
  source.addEventListener("change", (event) => take(event.data, false));
}

// A page that nobody sees costs nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else { connect(); refreshHour(); }
});

const hour = new Hour($("hour"), "");
function refreshHour() {
  if (!document.hidden) hour.refresh().catch(() => {});
}

// ---- keys ----

document.addEventListener("keydown", (event) => {
  const isTyping = event.target instanceof HTMLInputElement;
  if (event.key === "/" && !isTyping && !details.id) { event.preventDefault(); $("filter").focus(); }
  if (event.key === "Escape" && event.target === $("filter")) { $("filter").value = ""; arrangeAll(); }
});
function arrangeAll() { Object.values(tables).forEach((table) => table.arrange()); }
$("filter").addEventListener("input", arrangeAll);

connect();
refreshHour();
setInterval(refreshHour, 5000);
setInterval(() => { if (!document.hidden) refreshDetails(); }, 2000);
ask("/api/about").then((it) => {
  about = it;
  setText($("where"), it.machine);
  setText($("version"), `Version ${it.version}${it.changes ? ", changes allowed" : ", read-only"}.`);
  document.title = `Farfield – ${it.machine}`;
}).catch(() => {});

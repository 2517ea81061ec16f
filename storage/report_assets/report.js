"use strict";
// Everything that a model or a user wrote goes through textContent: the page has no other way in.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

function drawing(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
}

function chart(title, names) {
  const known = names.filter((name) => data.metrics[name]);
  const figure = element("figure");
  const readout = element("span", { class: "muted" });
  figure.append(element("figcaption", {}, element("strong", {}, title), readout));
  const series = known.map((name) => data.metrics[name]);
  const values = series.flat().filter((value) => value !== null);
  const low = Math.min(...values), high = Math.max(...values);
  const last = Math.max(data.iterations.length - 1, 1);
  const x = (place) => 60 + (place / last) * 334;
  const y = (value) => 128 - (high > low ? (value - low) / (high - low) : 0.5) * 116;
  const svg = drawing("svg", { viewBox: "0 0 400 150", preserveAspectRatio: "none" });
  for (const [value, at] of [[high, 12], [low, 128]]) {
    svg.append(drawing("line", { x1: 60, x2: 394, y1: at, y2: at }));
    svg.append(drawing("text", { x: 56, y: at + 3, "text-anchor": "end" }, Number(value.toPrecision(3))));
  }
  svg.append(drawing("text", { x: 60, y: 146 }, number(data.iterations[0])));
  svg.append(drawing("text", { x: 394, y: 146, "text-anchor": "end" }, number(data.iterations.at(-1))));
  known.forEach((name, which) => {
    let path = "", pen = false;
    series[which].forEach((value, place) => {
      if (value === null) { pen = false; return; }
      path += `${pen ? "L" : "M"}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
      if (!pen && (place === last || series[which][place + 1] === null)) path += "h1";
      pen = true;
    });
    const hue = (210 + which * 67) % 360;
    const line = drawing("path", { d: path, style: `stroke:hsl(${hue} 70% 50%)` });
    line.append(drawing("title", {}, name));
    svg.append(line);
  });
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * 400 - 60) / 334;
    const place = Math.min(Math.max(Math.round(share * last), 0), data.iterations.length - 1);
    readout.textContent = `iteration ${data.iterations[place]}: ` +
      known.map((name, which) => `${known.length > 1 ? name + " " : ""}${number(series[which][place])}`).join(", ");
  });
  readout.textContent = known.length > 1 ? known.join(", ") : `last ${number(series[0].at(-1))}`;
  figure.append(svg);
  return figure;
}

function drawCharts() {
  for (const [title, names] of data.panels) {
    if (names.some((name) => data.metrics[name])) byId("charts").append(chart(title, names));
  }
  const picker = byId("metric");
  for (const name of Object.keys(data.metrics).sort()) picker.append(element("option", { value: name }, name));
  const draw = () => byId("chosen").replaceChildren(chart(picker.value, [picker.value]));
  picker.addEventListener("change", draw);
  if (picker.options.length) draw();
  else byId("anyMetric").hidden = true;
}

function shade(node, value, scale) {
  if (value === null || !scale) return;
  const strength = Math.min(Math.abs(value) / scale, 1);
  if (strength < 0.02) return;
  const full = value > 0 ? [46, 160, 67] : [218, 54, 51];
  node.style.backgroundColor = `rgb(${full.map((part) => Math.round(255 + (part - 255) * strength)).join(" ")})`;
  node.className = strength > 0.6 ? "full" : "tinted";
}

function heatMap(sample, column) {
  const box = element("div", { class: "text tokens" });
  const values = sample.columns[column] || [];
  sample.tokens.forEach((piece, place) => {
    const node = element("span", {}, piece);
    shade(node, values[place] ?? null, data.scales[column]);
    node.dataset.place = place;
    box.append(node);
  });
  box.addEventListener("mouseover", (event) => {
    const place = event.target.dataset.place;
    if (place === undefined) return;
    const parts = Object.entries(sample.columns).map(([name, all]) => `${name} ${number(all[place])}`);
    byId("detail").textContent = `token ${place} ${JSON.stringify(sample.tokens[place])}  ${parts.join("  ")}`;
  });
  return box;
}

function card(sample, column) {
  const head = element("div", { class: "head" });
  head.append(element("strong", {}, `iteration ${sample.iteration}, row ${sample.row}`), element("span", {}, sample.why));
  for (const [name, value] of Object.entries(sample.values)) head.append(element("span", {}, `${name} ${number(value)}`));
  const box = element("article", { class: "sample" }, head);
  if (sample.prompt) box.append(element("div", { class: "text prompt" }, sample.prompt));
  box.append(sample.tokens && column ? heatMap(sample, column) : element("div", { class: "text" }, sample.text));
  if (sample.cut) box.append(element("div", { class: "muted" }, sample.cut));
  return box;
}

const PAGE = 20;
let shown = PAGE;

function matching() {
  const wanted = byId("search").value.toLowerCase();
  const which = byId("which").value, iteration = byId("iteration").value;
  return data.samples.filter((sample) =>
    (!which || sample.why === which) &&
    (!iteration || String(sample.iteration) === iteration) &&
    (!wanted || sample.search.includes(wanted)));
}

function drawSamples() {
  const found = matching();
  byId("samples").replaceChildren(...found.slice(0, shown).map((sample) => card(sample, byId("column").value)));
  byId("found").textContent = `${found.length} of ${data.samples.length} samples on this page`;
  byId("more").hidden = found.length <= shown;
}

function fillChoices() {
  for (const name of Object.keys(data.scales)) byId("column").append(element("option", { value: name }, name));
  for (const why of new Set(data.samples.map((sample) => sample.why))) byId("which").append(element("option", { value: why }, why));
  for (const place of new Set(data.samples.map((sample) => sample.iteration))) {
    byId("iteration").append(element("option", { value: String(place) }, `iteration ${place}`));
  }
  const last = data.samples.at(-1);
  if (last) byId("iteration").value = String(last.iteration);
  for (const sample of data.samples) sample.search = `${sample.prompt}\n${sample.text}`.toLowerCase();
  for (const id of ["search", "which", "iteration", "column"]) {
    byId(id).addEventListener("input", () => { shown = PAGE; drawSamples(); });
  }
  byId("more").addEventListener("click", () => { shown += PAGE; drawSamples(); });
}

document.title = data.run;
byId("run").textContent = data.run;
byId("about").textContent = data.about;
for (const [name, value] of Object.entries(data.facts)) {
  byId("facts").append(element("tr", {}, element("td", { class: "muted" }, name), element("td", {}, number(value))));
}
byId("config").textContent = data.config;
byId("configured").hidden = !data.config;
for (const row of data.evaluations) {
  byId("evaluations").append(element("tr", {}, ...row.map((text) => element("td", {}, text))));
}
byId("evaluated").hidden = !data.evaluations.length;
drawCharts();
fillChoices();
drawSamples();

// The what-if page: choices above, answers below. A point of a sweep is an object of its axes' indices and its figures.

const axes = values.axes.map((axis) => axis.name);
const titles = Object.fromEntries(values.axes.map((axis) => [axis.name, axis]));
const points = values.rows.map((row) =>
  Object.fromEntries([...axes.map((name, n) => [name, row[n]]), ...values.figures.map((name, n) => [name, row[axes.length + n]])]));
const parts = axes.filter((name) => name === "machine" || name.startsWith("set."));
const MODEL = values.model;
const BEST = -1; // of the policies
const SAME = 5e-5; // a change of seconds below this share is none
const chosen = Object.fromEntries(axes.map((name) => [name, name === "policy" ? BEST : 0]));

const label = (axis, index) => {
  const value = titles[axis].labels[index];
  return value === "x1" ? "as it is" : value === true ? "yes" : value === false ? "no" : String(value);
};
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
// Three digits, zeros among them.
const digits = (value) => {
  const rounded = Number(value.toPrecision(3));
  const places = rounded ? Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(rounded))))) : 0;
  return rounded.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
};
const error = (point) => (point.expected_error === null ? " ± ?" : ` ± ${Math.round(100 * point.expected_error)} %`);
const seconds = (s) => (s >= 1 ? `${digits(s)} s` : `${digits(1000 * s)} ms`);
const gigabytes = (bytes) => `${digits(bytes / 1e9)} GB`;
const billions = (params) => `${digits(params / 1e9)} B`;
const binds = (point) => values.binds[point.bound_by] || point.bound_by;
const senseless = (point) => point.fits === null; // no question of memory: the job has no plan there
const priceOf = (point) => values.prices[parts.map((name) => titles[name].values[point[name]]).join("|")] || null;
const perMillion = (point) => (priceOf(point) ? (priceOf(point)[0] / 3600 / point.tokens_per_s) * 1e6 : null);

// Points that are as chosen in all axes but `free`.
const alike = (...free) => points.filter((point) => axes.every((name) => free.includes(name) || chosen[name] === BEST || point[name] === chosen[name]));
const fitting = (found) => found.filter((point) => point.fits === true && point.tokens_per_s);
const fastest = (found) => fitting(found).reduce((best, point) => (best === null || point.iteration_s < best.iteration_s ? point : best), null);

// A number stays on one line with its error and its unit.
function write(id, text) {
  document.getElementById(id).textContent = text.replace(/ (?=[±%]|(?:s|ms|GB|days)\b)|(?<=±) /g, "\u00a0");
}

function table(id, heads, rows) {
  const cells = (row) => row.map((cell, n) =>
    n ? `<td data-head="${escaped(heads[n])}">${escaped(cell)}</td>` : `<th scope="row">${escaped(cell)}</th>`).join("");
  document.getElementById(id).innerHTML = rows.length
    ? `<div class="scroll wide"><table><thead><tr>${heads.map((head) => `<th scope="col">${escaped(head)}</th>`).join("")}</tr></thead>` +
      `<tbody>${rows.map((row) => `<tr>${cells(row)}</tr>`).join("")}</tbody></table></div>`
    : "";
}

function job() {
  const found = alike();
  const best = fastest(found);
  const name = label(MODEL, chosen[MODEL]);
  write("job", best
    ? `${name} trains with ${label("policy", best.policy)}: ${seconds(best.iteration_s)}${error(best)} per iteration, ` +
      `${digits(best.tokens_per_s)} tokens/s${error(best)}. What binds: ${binds(best)}.`
    : found.length === 0 ? "The sweep has no such point."
      : found.every(senseless) ? `${name} has no plan here: ${values.reasons[found[0].why]}.` : `${name} does not fit here.`);
  table("job-table", ["policy", "seconds per iteration", "tokens/s", "$ per million tokens", "above the bound", "binds", "GPU", "host"],
    found.map((p) => p.fits === true
      ? [label("policy", p.policy), seconds(p.iteration_s) + error(p), digits(p.tokens_per_s) + error(p),
        perMillion(p) === null ? "no price" : `$${digits(perMillion(p))}${error(p)}`, p.gap === null ? "" : `${(100 * p.gap).toFixed(p.gap < 0.00995 ? 2 : 1)} %`,
        binds(p), gigabytes(p.peak_gpu_bytes), gigabytes(p.peak_host_bytes)]
      : [label("policy", p.policy), senseless(p) ? "no plan" : "does not fit", "", "", "", "", "", ""]));
  const said = found.filter((p) => p.fits !== true).map((p) =>
    `${label("policy", p.policy)} ${senseless(p) ? "has no plan" : "does not fit"}: ${values.reasons[p.why]}.`);
  write("job-reasons", found.every(senseless) ? "" : said.join(" "));
}

// The largest model that fits, and the next larger one of the sweep, among points of one policy.
function largestOf(found) {
  const fits = fitting(found).reduce((top, p) => (top === null || p[MODEL] > top[MODEL] ? p : top), null);
  const above = found.filter((p) => p.fits === false && (fits === null || p[MODEL] > fits[MODEL])).map((p) => p[MODEL]);
  return { fits, next: above.length ? Math.min(...above) : null };
}

const size = (model) => (values.params[model] === null ? label(MODEL, model) : `${label(MODEL, model)} (${billions(values.params[model])} parameters)`);
const upTo = (found) => (found.next === null ? "it is the largest of the sweep, a larger one may fit" : `${size(found.next)} does not fit`);

function largest() {
  const found = alike(MODEL);
  const policies = [...new Set(found.map((p) => p.policy))];
  const each = policies.map((policy) => ({ policy, ...largestOf(found.filter((p) => p.policy === policy)) }));
  const best = each.filter((one) => one.fits).sort((a, b) => b.fits[MODEL] - a.fits[MODEL] || a.fits.iteration_s - b.fits.iteration_s)[0];
  write("largest", best
    ? `${size(best.fits[MODEL])} with ${label("policy", best.policy)}; ${upTo(best)}.`
    : found.length && found.every(senseless) ? "No model of the sweep has a plan on this machine." : "No model of the sweep fits this machine.");
  table("largest-table", ["policy", "largest model", "above it", "seconds per iteration", "$ per million tokens"],
    each.map((one) => one.fits
      ? [label("policy", one.policy), size(one.fits[MODEL]), upTo(one), seconds(one.fits.iteration_s) + error(one.fits),
        perMillion(one.fits) === null ? "no price" : `$${digits(perMillion(one.fits))}${error(one.fits)}`]
      : [label("policy", one.policy), "none", "", "", ""]));
}

function offers() {
  const tokens = 1e9 * document.getElementById("tokens").valueAsNumber;
  const deadline = document.getElementById("days").valueAsNumber;
  return fitting(alike("machine")).map((point) => {
    const price = priceOf(point);
    const days = tokens / point.tokens_per_s / 86400;
    const worst = days * (1 + (point.expected_error || 0));
    const inTime = days > deadline ? "no" : worst > deadline ? "within its error" : point.expected_error === null ? "yes ± ?" : "yes";
    return { point, days, inTime, usd: price ? days * 24 * price[0] : null, price };
  }).sort((a, b) => (a.usd === null) - (b.usd === null) || a.usd - b.usd);
}

function cheapest() {
  const all = offers();
  const best = all.find((offer) => offer.usd !== null && offer.inTime !== "no");
  const soonest = all.reduce((first, offer) => (first === null || offer.days < first.days ? offer : first), null);
  const name = label(MODEL, chosen[MODEL]);
  const where = (offer) => `${label("machine", offer.point.machine)} with ${label("policy", offer.point.policy)}`;
  write("cheapest", best
    ? `${name}: ${where(best)}, $${digits(best.usd)}${error(best.point)} in ${digits(best.days)} days${error(best.point)}` +
      `${best.inTime.startsWith("yes") ? "" : " (in time only within its error)"}.`
    : soonest && all.some((offer) => offer.usd !== null)
      ? `No machine of the sweep trains ${name} in time; the fastest is ${where(soonest)}, ${digits(soonest.days)} days${error(soonest.point)}.` : `No machine with a price trains ${name}.`);
  table("cheapest-table", ["machine, policy", "in time", "$", "days", "$ per million tokens", "list price per hour"],
    all.map((offer) => [where(offer), offer.inTime, offer.usd === null ? "no price" : `$${digits(offer.usd)}${error(offer.point)}`,
      digits(offer.days) + error(offer.point), perMillion(offer.point) === null ? "" : `$${digits(perMillion(offer.point))}${error(offer.point)}`,
      offer.price ? `$${offer.price[0].toFixed(2)}` : "no price"]));
  const priced = new Map(all.filter((offer) => offer.price).map((offer) => [label("machine", offer.point.machine), offer.price[1]]));
  write("prices", priced.size ? `Prices: ${[...priced].map(([machine, of]) => `${machine}: ${of}`).join("; ")}.` : "");
  pareto(all.filter((offer) => offer.usd !== null));
}

function pareto(all) {
  for (const part of document.querySelectorAll("[data-priced]")) part.hidden = all.length === 0;
  if (all.length === 0) {
    drawn.delete(document.getElementById("pareto")); // a change of the theme draws what has a width
    return;
  }
  const x = (offer) => perMillion(offer.point);
  const y = (offer) => offer.point.tokens_per_s;
  const bars = (mine, of) => ({ type: "data", array: mine.map((o) => of(o) * (o.point.expected_error || 0)), thickness: 1.2, width: 3 });
  const front = all.filter((o) => !all.some((other) => x(other) <= x(o) && y(other) >= y(o) && (x(other) < x(o) || y(other) > y(o))))
    .sort((a, b) => x(a) - x(b));
  const narrow = document.getElementById("pareto").clientWidth < 480; // room for the names of the two ends
  const named = narrow ? [front[0], front[front.length - 1]] : front;
  // A name stands beside its point, at the end of a line, where it is farthest from points and other names.
  const [wide, high] = [document.getElementById("pareto").clientWidth - 94, 310];
  const pixel = (o) => [(wide * x(o)) / (1.06 * Math.max(...all.map(x))), high * (1 - y(o) / (1.1 * Math.max(...all.map(y))))];
  const taken = all.map(pixel);
  const annotations = [...new Set(named)].filter((o) => o).map((o) => {
    const [left, top] = pixel(o);
    const free = ([ax, ay]) => (left + ax < 50 || left + ax > wide - 40 || top + ay < 8 || top + ay > high - 8 ? -1
      : Math.min(...taken.map(([a, b]) => Math.max(Math.abs(a - left - ax) / 55, Math.abs(b - top - ay) / 14))));
    const places = [[60, -30], [60, 30], [-60, -30], [-60, 30], [5, -40], [5, 40], [90, -60], [90, 60], [-90, -60], [10, -75]];
    const [ax, ay] = places.reduce((best, one) => (Math.min(free(one), 2) > Math.min(free(best), 2) ? one : best));
    taken.push([left + ax, top + ay]);
    return { x: x(o), y: y(o), text: label("machine", o.point.machine), ax, ay, showarrow: true, arrowhead: 0, arrowwidth: 1,
      arrowcolor: "@ink", bgcolor: "@paper", borderpad: 1, font: { size: 12, color: "@ink" }, name: "1" };
  });
  const symbols = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"];
  const policies = [...new Set(all.map((o) => o.point.policy))].sort((a, b) => a - b);
  const data = [{ type: "scatter", mode: "lines", x: front.map(x), y: front.map(y), line: { color: "@ink", width: 1, dash: "dot" }, hoverinfo: "skip" }];
  for (const policy of policies) {
    const mine = all.filter((o) => o.point.policy === policy);
    data.push({ type: "scatter", mode: "markers", name: label("policy", policy), x: mine.map(x), y: mine.map(y),
      error_x: bars(mine, x), error_y: bars(mine, y), cliponaxis: false,
      customdata: mine.map((o) => `${label("machine", o.point.machine)}, ${label("policy", policy)}`),
      hovertemplate: "%{customdata}<br>$%{x:.3g} per million tokens<br>%{y:.3g} tokens/s<extra></extra>",
      marker: { size: 11, symbol: symbols[policy % symbols.length], color: values.colours[policy], line: { width: 1, color: "@ink" } } });
  }
  const axis = (title) => ({ title: { text: title }, gridcolor: "@grid", linecolor: "@grid", zeroline: false, rangemode: "tozero", automargin: true });
  draw(document.getElementById("pareto"), { data, layout: {
    annotations, height: 380, margin: { l: 64, r: 30, t: 24, b: 46 }, paper_bgcolor: "@paper", plot_bgcolor: "@paper", showlegend: false,
    font: { size: 13, color: "@ink", family: "system-ui, sans-serif" }, xaxis: axis("$ per million tokens"), yaxis: axis("tokens/s"),
    hoverlabel: { bgcolor: "@paper", bordercolor: "@ink", font: { color: "@ink", size: 13 } } } });
  document.getElementById("legend").innerHTML = `<ul class="legend">${policies.map((policy) =>
    `<li><span class="swatch" style="background:light-dark(${["light", "dark"].map((name) => themed(values.colours[policy], values.themes[name]))})"></span>${escaped(label("policy", policy))}</li>`).join("")}</ul>`;
}

function more() {
  const now = fastest(alike());
  const rows = [];
  const same = []; // parts that change nothing are no offer
  const changed = (gain, then) => change(gain, [now.expected_error, then.expected_error]);
  for (const axis of parts.filter((name) => name !== "machine" && titles[name].values.length > 1))
    titles[axis].values.forEach((_, index) => {
      if (index === chosen[axis]) return;
      const there = (free) => alike(axis, ...free).filter((p) => p[axis] === index);
      const then = fastest(there([]));
      const before = largestOf(bestOf(alike(MODEL)));
      const after = largestOf(bestOf(there([MODEL])));
      const gain = now && then ? then.iteration_s / now.iteration_s - 1 : null;
      const models = [before, after].map((one) => (one.fits ? label(MODEL, one.fits[MODEL]) : "none"));
      const instead = label(axis, chosen[axis]) === "as it is" ? "" : ` instead of ${label(axis, chosen[axis])}`;
      const grown = models[0] === models[1] ? "" : `, largest model ${models[1]} instead of ${models[0]}`;
      const asNow = gain !== null && Math.abs(gain) < SAME && grown === "";
      if (asNow || (!now && !then && grown === "")) {
        same.push(`${titles[axis].title} ${label(axis, index)}`);
        return;
      }
      rows.push({ says: `with ${titles[axis].title} ${label(axis, index)}: ${gain === null ? "does not fit" : `${changed(gain, then)} in seconds`}${grown}`, cells: [
        `${titles[axis].title}: ${label(axis, index)}${instead}`,
        then ? seconds(then.iteration_s) + error(then) : "does not fit", gain === null ? "" : changed(gain, then),
        after.fits ? size(after.fits[MODEL]) : "none", before.fits ? size(before.fits[MODEL]) : "none"] });
    });
  const name = label(MODEL, chosen[MODEL]);
  const idle = same.length ? ` Without effect: ${same.join("; ")}.` : "";
  write("more", rows.length + same.length === 0 ? "The sweep varies no part of the machine."
    : rows.length === 0 ? `Nothing.${idle}`
    : !now ? `${name} does not fit on this machine as it is.`
    : `${name} takes ${seconds(now.iteration_s)}${error(now)} now; ${rows.map((row) => row.says).join("; ")}.${idle}`);
  table("more-table", ["another part", "seconds per iteration", "change", "largest model", "largest now"], rows.map((row) => row.cells));
}

// A change of time with its bar: [Note: error of a change] in planner/trust.py; in words as report/tables.format_change.
function change(share, errors) {
  if (Math.abs(share) < SAME) return "no change";
  const percent = (value) => (100 * value).toFixed(Math.abs(share) < 0.000995 ? 3 : Math.abs(share) < 0.00995 ? 2 : 1);
  const bar = errors.includes(null) ? "?" : percent(Math.min(Math.abs(share), 1 + share) * Math.hypot(...errors));
  return `${share > 0 ? "+" : ""}${percent(share)} ± ${bar} %`;
}

// Of the points of each model, the fastest that fits, or one that does not.
function bestOf(found) {
  return [...new Set(found.map((p) => p[MODEL]))].map((model) => {
    const mine = found.filter((p) => p[MODEL] === model);
    return fastest(mine) || mine[0];
  });
}

function answer() {
  for (const part of [job, largest, cheapest, more]) part();
}

for (const axis of values.axes) {
  if (axis.values.length < 2 && !["machine", MODEL].includes(axis.name)) continue;
  const place = document.createElement("label");
  const options = axis.values.map((_, n) => `<option value="${n}">${escaped(label(axis.name, n))}</option>`);
  if (axis.name === "policy") options.unshift(`<option value="${BEST}">the fastest</option>`);
  place.innerHTML = `${escaped(axis.title)}<select id="${escaped(axis.name)}">${options.join("")}</select>`;
  place.querySelector("select").addEventListener("change", (event) => {
    chosen[axis.name] = Number(event.target.value);
    answer();
  });
  document.getElementById("choices").append(place);
}
document.getElementById("tokens").value = values.tokens / 1e9;
document.getElementById("days").value = values.days;
for (const id of ["tokens", "days"]) document.getElementById(id).addEventListener("input", cheapest);
answer();

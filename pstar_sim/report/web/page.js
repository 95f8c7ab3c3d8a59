"use strict";
// What all pages share: the theme, figures drawn in its colours, groups of buttons of which one is pressed.

const values = JSON.parse(document.getElementById("values").textContent);
const drawn = new Map(); // element -> figure as it was given
const SHEET = 680; // pixels of a printed page
let printed = false;

function themed(value, colours) {
  if (typeof value === "string") return /^[@#]/.test(value) ? colours[value] || value : value;
  if (Array.isArray(value)) {
    const numbers = typeof value[0] === "number" && typeof value[value.length - 1] === "number";
    return numbers ? value : value.map((one) => themed(one, colours));
  }
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, themed(one, colours)]));
}

function draw(place, figure) {
  drawn.set(place, figure);
  const shown = themed(figure, values.themes[document.documentElement.dataset.theme]);
  for (const trace of shown.data)
    if (trace.meta && trace.meta.words)
      trace.text = trace.z.map((row, n) => row.map((code) => `${trace.meta.rows[n]}: ${trace.meta.words[code]}`));
  const narrow = place.clientWidth < 480;
  if (narrow) {
    shown.layout.margin = { ...shown.layout.margin, l: 52, r: 6 };
    if (shown.layout.yaxis.ticktext) shown.layout.yaxis = { ...shown.layout.yaxis, tickvals: null, ticktext: null }; // no room
    shown.layout.annotations = (shown.layout.annotations || []).filter((one) => Number(one.name) > 0.2); // shares of the width
  }
  if (printed) shown.layout.width = Math.min(place.clientWidth, SHEET);
  place.style.height = `${shown.layout.height}px`; // which a change of the width keeps
  Plotly.react(place, shown.data, shown.layout, { responsive: true, displaylogo: false, displayModeBar: false });
  if (!printed && place.clientWidth !== place._fullLayout.width) Plotly.Plots.resize(place); // another column came or went
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  for (const button of document.querySelectorAll("[data-theme-button]"))
    button.textContent = name === "dark" ? "light" : "dark";
  for (const [place, figure] of drawn) draw(place, figure);
}

// Paper is white, narrower than a screen, and unfolds nothing.
let before;
let folded = [];
addEventListener("beforeprint", () => {
  before = document.documentElement.dataset.theme;
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const part of folded) part.open = true;
  printed = true;
  setTheme("light");
});
addEventListener("afterprint", () => {
  printed = false;
  for (const part of folded) part.open = false;
  setTheme(before);
});

// Calls `chosen` with the value of the button that was pressed.
function choice(group, chosen) {
  const buttons = [...group.querySelectorAll("button")];
  for (const button of buttons)
    button.addEventListener("click", () => {
      for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
      chosen(button.value);
    });
}

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
for (const button of document.querySelectorAll("[data-theme-button]"))
  button.addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
for (const button of document.querySelectorAll("[data-theme-button]"))
  button.textContent = document.documentElement.dataset.theme === "dark" ? "light" : "dark";

// The report of plans: figures by name, and the tide by time or by moment.

// Elements with data-x are shown with that x alone, and a chart is drawn when it has a width.
function show(x) {
  for (const part of document.querySelectorAll("[data-x]")) part.hidden = part.dataset.x !== x;
  for (const place of document.querySelectorAll("[data-figure]")) {
    const figure = values.figures[place.dataset.figure] || values.figures[`${place.dataset.figure} ${x}`];
    if (figure && figure !== drawn.get(place) && place.offsetParent !== null) draw(place, figure);
  }
}

for (const group of document.querySelectorAll("[data-choice=x]")) choice(group, show);
show(values.x);

// The report of plans: figures by name, and the tide by time or by moment.

for (const place of document.querySelectorAll("[data-figure]")) {
  const name = place.dataset.figure;
  draw(place, values.figures[name] || values.figures[`${name} ${values.x}`]);
}
for (const group of document.querySelectorAll("[data-choice=x]"))
  choice(group, (x) => {
    for (const place of document.querySelectorAll("[data-figure^=tide]"))
      draw(place, values.figures[`${place.dataset.figure} ${x}`]);
    for (const note of document.querySelectorAll("[data-x]")) note.hidden = note.dataset.x !== x;
  });


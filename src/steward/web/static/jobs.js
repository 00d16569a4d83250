// Job lists: short addresses, scroll position after going back, collapsible arrays.
"use strict";

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (!form.matches("form[data-lean]")) return;
  const boxes = [...form.querySelectorAll("input[name=columns]")];
  const chosen = boxes.filter((box) => box.checked).map((box) => box.value).join(",");
  const left = [...form.elements].filter((field) => field.name && (!field.value || field.value === field.dataset.usual));
  const disabled = [...left, ...boxes];
  for (const field of disabled) field.disabled = true;
  const columns = document.createElement("input");
  if (boxes.length && chosen !== form.dataset.usual) {
    Object.assign(columns, { type: "hidden", name: "columns", value: chosen });
    form.append(columns);
  }
  // The browser may restore the page from its cache.
  setTimeout(() => {
    columns.remove();
    for (const field of disabled) field.disabled = false;
  });
});

document.addEventListener("click", (event) => {
  const row = event.target.closest("table.jobs tr[id]");
  if (row && event.target.closest("a") && !event.defaultPrevented) {
    history.replaceState(history.state, "", `#${row.id}`);
  }
});

document.addEventListener("htmx:beforeRequest", (event) => {
  const link = event.target;
  if (!link.matches("a.opens")) return;
  if (link.getAttribute("aria-expanded") === "true") {
    event.preventDefault();
    const tasks = document.getElementById(link.getAttribute("aria-controls"));
    while (tasks.nextElementSibling?.classList.contains("task")) tasks.nextElementSibling.remove();
    link.setAttribute("aria-expanded", "false");
  }
});

document.addEventListener("htmx:afterRequest", (event) => {
  const link = event.target;
  if (event.detail.successful && link.matches?.("a.opens")) link.setAttribute("aria-expanded", "true");
});

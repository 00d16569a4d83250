// Lists of jobs: short addresses, a place to come back to, arrays that close again.
"use strict";

document.addEventListener("submit", (event) => {
  if (!event.target.matches("form[data-lean]")) return;
  for (const field of event.target.elements) {
    if (field.name && !field.value) field.disabled = true;
  }
  // The page may come back from where the browser keeps it.
  setTimeout(() => { for (const field of event.target.elements) field.disabled = false; });
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

// Behaviour beyond links and forms: errors of page parts appear in a live region,
// and irreversible actions ask for confirmation. All pages work without this file.
"use strict";

document.addEventListener("htmx:responseError", (event) => {
  const page = new DOMParser().parseFromString(event.detail.xhr.responseText, "text/html");
  const text = page.querySelector("[role=alert]")?.textContent ?? "Request failed.";
  document.getElementById("message").textContent = text;
});

document.addEventListener("htmx:sendError", () => {
  document.getElementById("message").textContent = "No answer from Steward: retry in a moment.";
});

document.addEventListener("htmx:beforeRequest", () => {
  document.getElementById("message").textContent = "";
});

document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.ask ?? event.target.dataset.ask;
  if (question && !window.confirm(question)) event.preventDefault();
});

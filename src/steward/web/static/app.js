// What pages do beyond links and forms: errors of parts are said where everybody notices them,
// and what cannot be taken back is asked about first. Without this file all pages still work.
"use strict";

document.addEventListener("htmx:responseError", (event) => {
  const page = new DOMParser().parseFromString(event.detail.xhr.responseText, "text/html");
  const text = page.querySelector("[role=alert]")?.textContent ?? "That went wrong.";
  document.getElementById("said").textContent = text;
});

document.addEventListener("htmx:sendError", () => {
  document.getElementById("said").textContent = "Steward does not answer: try again in a moment.";
});

document.addEventListener("htmx:beforeRequest", () => {
  document.getElementById("said").textContent = "";
});

document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.ask ?? event.target.dataset.ask;
  if (question && !window.confirm(question)) event.preventDefault();
});

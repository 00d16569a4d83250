// Live events: new rows appear at the top of the table. A polite live region announces their number;
// Pause holds rows back.
"use strict";

{
  const bar = document.getElementById("live");
  const body = document.getElementById("events");
  const button = bar?.querySelector("button");
  const status = bar?.querySelector("[role=status]");
  const MOST = 2000;
  const known = new Set();
  let held = [];
  let came = 0;
  let isPaused = false;
  let source = null;
  let place = "";

  const say = () => {
    if (isPaused) status.textContent = held.length ? `Paused: ${held.length} more` : "Paused";
    else status.textContent = came ? `Live: ${came} new` : "Live";
  };

  const show = (row) => {
    row.classList.add("new");
    body.prepend(row);
    came += 1;
  };

  const take = (event) => {
    place = event.lastEventId || place;
    const holder = document.createElement("template");
    holder.innerHTML = event.data;
    const row = holder.content.querySelector("tr");
    if (!row || known.has(row.dataset.key)) return;
    known.add(row.dataset.key);
    if (isPaused) held.push(row);
    else show(row);
    if (known.size > MOST) end("Too many events: reload the page.");
    else say();
  };

  const stop = () => {
    source?.close();
    source = null;
  };

  const end = (text) => {
    stop();
    button.hidden = true;
    status.textContent = text;
  };

  const listen = () => {
    if (source) return;
    const address = new URL(bar.dataset.live, location.href);
    if (place) address.searchParams.set("after", place);
    source = new EventSource(address);
    source.addEventListener("row", take);
    source.addEventListener("still", (event) => { place = event.lastEventId || place; });
    source.addEventListener("over", () => end("Session expired: reload the page to log in."));
    source.addEventListener("error", () => {
      if (source?.readyState === EventSource.CLOSED) end("Live updates stopped: reload the page.");
    });
  };

  if (bar && window.EventSource) {
    for (const row of body.rows) if (row.dataset.key) known.add(row.dataset.key);
    bar.hidden = false;
    say();
    listen();
    button.addEventListener("click", () => {
      isPaused = !isPaused;
      button.setAttribute("aria-pressed", String(isPaused));
      if (!isPaused) {
        held.forEach(show);
        held = [];
      }
      say();
    });
    // Hidden windows release their connection: a browser has only a few for each host.
    document.addEventListener("visibilitychange", () => (document.hidden ? stop() : listen()));
    window.addEventListener("pagehide", stop);
  }
}

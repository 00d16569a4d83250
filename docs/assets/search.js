// Search for whole questions. Material searches for every word as a prefix, so that "my" finds
// myBRC, and never stems a prefix. Here stop words are dropped, each word is stemmed, and only the
// last one, which may be half typed, is a prefix as well.
"use strict";
(() => {
  const QUERY = 2; // SearchMessageType.QUERY of Material's search worker
  const STOP_WORDS = new Set(
    ("a after all am an and another any are as at be been but by can cannot could did do does for " +
      "from get had has have how i if in into is it its me may might must my no not of off on or our " +
      "shall should so some than that the their them then there these they this to was we were what " +
      "when where which who whom why will with would you your").split(" "),
  );
  const post = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...options) {
    if (message?.type === QUERY && /^[\p{L}\p{N}\s?_.-]+$/u.test(message.data)) {
      const words = message.data.toLowerCase().replaceAll("?", " ").split(/[\s_.-]+/).filter(Boolean);
      const kept = words.filter((word) => !STOP_WORDS.has(word));
      if (kept.length > 0) {
        const data = [...kept.map((word) => `${word}^1`), kept.at(-1)].join(" ");
        message = { ...message, data };
      }
    }
    return post.call(this, message, ...options);
  };
})();

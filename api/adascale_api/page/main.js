// The page: its views by the hash of the address, the jobs that they show, the token and the theme.

import { setText } from "./dom.js";
import { clock, duration } from "./format.js";
import { CompareView } from "./compare_view.js";
import { JobView } from "./job_view.js";
import { JobsView } from "./jobs_view.js";
import { JobStream, getToken, setToken } from "./service.js";

const HIDDEN_FOR = 60000;
const THEME = "adascale-theme";

const main = document.getElementById("main");
const status = document.getElementById("status");
const stale = document.getElementById("stale");
const over = document.getElementById("over");
const dialog = document.getElementById("token-dialog");
const theme = document.getElementById("theme");

let view = null;
let hiding = 0;

const stream = new JobStream({
  onJobs: (jobs, changed) => document.hidden || view?.update(jobs, changed),
  onStatus: (state, message) => {
    // The metrics service of a run on this machine ends with it.
    const isOver = state === "lost" && ["127.0.0.1", "localhost"].includes(location.hostname) && stream.haveEnded;
    status.dataset.state = isOver ? "over" : state;
    document.body.classList.toggle("stale", state !== "live" && !isOver);
    over.hidden = !isOver;
    showAge();
    setText(status, state === "live" ? "Live" : isOver ? "The run is over" : state === "refused" ? "A token is needed" : `Disconnected: ${message.replace(/\.?$/, ".")} Trying again.`);
    if (state === "refused") askForToken(message);
  },
});

// While the service does not answer, what is shown is as old as its last answer.
function showAge() {
  const isStale = document.body.classList.contains("stale") && stream.lastAnswer !== null;
  stale.hidden = !isStale;
  if (isStale) setText(stale, `What is shown is from ${clock(stream.lastAnswer)}, ${duration(Date.now() / 1000 - stream.lastAnswer)} ago.`);
}

function open() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const options = new URLSearchParams(query);
  // `adascale run` and `adascale ui` print an address with the token, which stays in this tab.
  if (options.has("token")) {
    setToken(options.get("token"));
    options.delete("token");
    history.replaceState(null, "", `#${path}${options.size ? `?${options}` : ""}`);
    showToken();
  }
  const job = /^\/jobs\/([^/]+)$/.exec(path);
  const isMoved = view !== null;
  view?.close();
  if (path === "/compare") view = new CompareView(stream, options);
  else view = job ? new JobView(stream, fullId(decode(job[1])), options) : new JobsView(stream);
  main.replaceChildren(view.node);
  document.title = view.title();
  if (isMoved) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function fullId(id) {
  return id.includes(".") ? id : `default.${id}`;
}

function askForToken(reason) {
  if (reason) setText(document.getElementById("token-reason"), reason);
  if (!dialog.open) dialog.showModal();
}

function useToken(token) {
  setToken(token);
  showToken();
  stream.stop();
  stream.start();
  open();
}

function showToken() {
  setText(document.getElementById("token-button"), getToken() ? "Read token: set" : "Read token");
}

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.getElementById("token-button").addEventListener("click", () => askForToken(""));
dialog.addEventListener("close", () => {
  const field = document.getElementById("token");
  if (dialog.returnValue === "use" && field.value.trim()) useToken(field.value.trim());
  if (dialog.returnValue === "clear") useToken("");
  field.value = "";
  dialog.returnValue = "";
});
theme.addEventListener("change", () => {
  localStorage.setItem(THEME, theme.value);
  setTheme(theme.value);
});
// A page that is not seen takes nothing from the service.
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => stream.stop(), HIDDEN_FOR);
  else {
    stream.start();
    view?.update(stream.jobs, null);
  }
});
addEventListener("hashchange", open);
setInterval(showAge, 1000);

theme.value = localStorage.getItem(THEME) ?? "auto";
setTheme(theme.value);
showToken();
open();
stream.start();

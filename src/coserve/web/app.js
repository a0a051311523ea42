// The shell: navigation, the theme, the login, and the view that the address names.

import { Button, Field, Notice, Toasts, html, keepDraftsOf, render, useEffect, useErrorBoundary, useState } from "./ui.js";
import { logIn, logOut, signals, whoami } from "./api.js";
import { views } from "./views/index.js";

const here = () => {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const view = views.find((one) => one.name === name) ?? views[0];
  return { view, rest: rest.map((part) => { try { return decodeURIComponent(part); } catch { return part; } }) };
};

function App() {
  const [login, show] = useState(null); // null while it is not known, false where nobody is logged in
  const setLogin = (found) => { if (found) keepDraftsOf(found.tenant); show(found); };
  const [problem, setProblem] = useState(null);
  const [place, setPlace] = useState(here);
  useEffect(() => {
    const moved = () => { setPlace(here()); document.getElementById("main").focus({ preventScroll: true }); };
    const out = () => setLogin(false);
    addEventListener("hashchange", moved);
    signals.addEventListener("login", out);
    let timer;
    const ask = () => whoami().then((found) => { setLogin(found); setProblem(null); }).catch((error) => {
      if (error.status === 401) return setLogin(false);
      setProblem(error);
      timer = setTimeout(ask, 2000);
    });
    ask();
    return () => { clearTimeout(timer); removeEventListener("hashchange", moved); signals.removeEventListener("login", out); };
  }, []);
  useEffect(() => { document.title = `${place.view.title} · coserve`; }, [place]);
  const leave = async () => { await logOut(); setLogin(false); setTimeout(() => keepDraftsOf("")); }; // once the view has gone, which saves
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>To the content</a>
    <header class="rail"><a class="brand" href="#/now">coserve</a>
      <nav aria-label="Views">${views.map((one) => html`<a key=${one.name} href="#/${one.name}" aria-current=${one === place.view ? "page" : undefined}>${one.title}</a>`)}</nav>
      <div class="foot"><${Theme} />${login && html`<span class="who" title="Tenant"><bdi>${login.tenant}</bdi></span>`}
        ${login?.by === "cookie" && html`<${Button} quiet onClick=${leave}>Log out<//>`}</div></header>
    <main id="main" tabindex="-1"><${Notice} error=${problem} />${login === false ? html`<${LogIn} onDone=${setLogin} />` : login && html`<${View} key=${place.view.name} view=${place.view} rest=${place.rest} login=${login} />`}</main>
    <${Toasts} />`;
}

// Loads a view's module and renders it; an error in it is shown in its place.
function View({ view, rest, login }) {
  const [loaded, setLoaded] = useState(null);
  const [failed, setFailed] = useState(null);
  const [crash] = useErrorBoundary((error) => console.error(error));
  useEffect(() => { view.load().then((module) => setLoaded({ Body: module.default })).catch(setFailed); }, [view]);
  if (crash || failed) return html`<${Notice}>This view has failed: ${(crash ?? failed).message}. Reload the page to try again.<//>`;
  return html`<h1>${view.title}</h1>${loaded && html`<${loaded.Body} rest=${rest} login=${login} />`}`;
}

function LogIn({ onDone }) {
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const key = new FormData(event.target).get("key").trim();
    if (!key) return setError({ message: "Enter an API key." });
    setBusy(true);
    try { onDone(await logIn(key)); } catch (found) { setError(found); setBusy(false); }
  };
  return html`<form class="login panel" onSubmit=${submit}><h1>Log in</h1>
    <${Field} label="API key" error=${error} hint="Whoever runs this server makes one with: coserve keys create NAME"><input name="key" type="password" autocomplete="current-password" spellcheck="false" autofocus /><//>
    <${Button} type="submit" disabled=${busy}>Log in<//></form>`;
}

function Theme() {
  const root = document.documentElement;
  const [theme, setTheme] = useState(root.dataset.theme ?? "");
  const choose = ({ target }) => {
    setTheme(target.value);
    if (target.value) root.dataset.theme = target.value; else delete root.dataset.theme;
    try { localStorage.setItem("coserve-theme", target.value); } catch { /* storage is off: it lasts for this page */ }
    dispatchEvent(new Event("theme"));
  };
  useEffect(() => {
    const system = matchMedia("(prefers-color-scheme: dark)"), turn = () => dispatchEvent(new Event("theme"));
    system.addEventListener("change", turn);
    return () => system.removeEventListener("change", turn);
  }, []);
  return html`<select class="theme" aria-label="Theme" value=${theme} onChange=${choose}>
    <option value="">System</option><option value="light">Light</option><option value="dark">Dark</option></select>`;
}

render(html`<${App} />`, document.getElementById("app"));

// Requests to the server. All errors are an `ApiError`, whose message is a sentence to show.

export class ApiError extends Error {
  constructor(status, message, code = null, param = null) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

// Tells "login" (this page has to log in again) to whoever listens.
export const signals = new EventTarget();

let token = null; // what requests that change something need beside the cookie

// The caller: { tenant, by: "cookie" | "key" | "loopback" }. Throws an ApiError 401 where nobody is logged in.
export async function whoami() {
  return keep(await get("/web/api/login"));
}

export async function logIn(key) {
  const headers = { authorization: `Bearer ${key}` };
  return keep(await (await request("POST", "/web/api/login", { headers })).json());
}

export async function logOut() {
  await request("DELETE", "/web/api/login");
  token = null;
  signals.dispatchEvent(new Event("login"));
}

function keep(login) {
  token = login.token;
  return login;
}

export const get = async (path, options) => (await request("GET", path, options)).json();
export const post = async (path, json, options) => (await request("POST", path, { json, ...options })).json();
export const remove = async (path, options) => (await request("DELETE", path, options)).json();

// The response. `json` or `body` (a FormData, say) is sent; `signal` is an AbortSignal.
export async function request(method, path, { json, body, headers, signal } = {}) {
  const sent = { ...headers };
  if (json !== undefined) sent["content-type"] = "application/json";
  if (token && method !== "GET") sent["x-coserve-token"] = token;
  let response;
  try {
    response = await fetch(path, {
      method, signal, headers: sent, body: json === undefined ? body : JSON.stringify(json), cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, `The server cannot be reached. ${method === "GET" ? "This page tries again by itself." : "Try again once it runs."}`);
  }
  if (response.ok) return response;
  const told = (await response.json().catch(() => null))?.error;
  const message = told?.message ?? `The server answered ${response.status}.`;
  if (response.status === 401 && !headers?.authorization) signals.dispatchEvent(new Event("login"));
  throw new ApiError(response.status, message, told?.code, told?.param);
}

// The data of server-sent events, parsed; ends with the stream or with `data: [DONE]`. Options as `request`'s,
// and `method`; `onHeaders` is told the response's headers. An event that is an error is thrown.
export async function* stream(path, { method = "GET", onHeaders, ...options } = {}) {
  const response = await request(method, path, options);
  onHeaders?.(response.headers);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The connection to the server was lost.");
      });
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const lines = event.split("\n").filter((line) => line.startsWith("data:"));
        const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const found = JSON.parse(data);
        if (found?.error?.message) throw new ApiError(found.error.status ?? 500, found.error.message, found.error.code);
        yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Like fetch for a POST, but tells how much of the body is sent: fetch cannot.

// Return a Response once its head is there; its body comes as a stream. `tell(share)` is called while the body leaves.
export function upload(path, { headers, body, signal, tell }) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const encoder = new TextEncoder();
    let stream = null;
    let passed = 0;
    const give = () => {
      const text = request.responseText; // UTF-8: whole characters
      if (text.length > passed) stream?.enqueue(encoder.encode(text.slice(passed)));
      passed = text.length;
    };
    const stop = () => request.abort();
    const fail = (error) => {
      signal?.removeEventListener("abort", stop);
      if (stream) stream.error(error);
      reject(error);
    };
    signal?.throwIfAborted();
    signal?.addEventListener("abort", stop);
    request.open("POST", path);
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", ({ loaded, total }) => total && tell(loaded / total));
    request.addEventListener("readystatechange", () => {
      if (request.readyState === XMLHttpRequest.HEADERS_RECEIVED) {
        const answer = new ReadableStream({ start: (controller) => (stream = controller), cancel: stop });
        resolve(new Response(answer, { status: request.status, statusText: request.statusText }));
      }
      if (request.readyState === XMLHttpRequest.LOADING) give();
    });
    request.addEventListener("load", () => {
      signal?.removeEventListener("abort", stop);
      give();
      stream?.close();
    });
    request.addEventListener("error", () => fail(new TypeError("no connection"))); // as of fetch
    request.addEventListener("abort", () => fail(signal?.reason ?? new DOMException("stopped", "AbortError")));
    request.send(body);
  });
}

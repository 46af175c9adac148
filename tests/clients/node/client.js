// Acts as Envoy towards a picker: one ext_proc stream per request. Prints "ok NAME" or "FAILED NAME: why" for each case.
//
//     node client.js HOST:PORT [CA.pem]

import fs from "node:fs";
import path from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protobuf from "protobufjs";

const HERE = path.dirname(fileURLToPath(import.meta.url));
const PROTO = path.join(HERE, "../../../loadtest/load/proto/ext_proc.proto");
const METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
const CASE_MS = 30000;
const DESTINATION = "x-gateway-destination-endpoint";
const PIECE_BYTES_MAX = 62000;

const root = new protobuf.Root().loadSync(PROTO, { keepCase: true });
const Request = root.lookupType("epp.ext_proc.v1.ProcessingRequest");
const Response = root.lookupType("epp.ext_proc.v1.ProcessingResponse");
const encode = (message) => Buffer.from(Request.encode(Request.fromObject(message)).finish());
const decode = (data) => Response.decode(data);

const [address, authority] = process.argv.slice(2);
const credentials = authority
  ? grpc.credentials.createSsl(fs.readFileSync(authority), null, null, { checkServerIdentity: () => undefined })
  : grpc.credentials.createInsecure();

function newClient() {
  return new grpc.Client(address, credentials, { "grpc.max_receive_message_length": -1, "grpc.use_local_subchannel_pool": 1 });
}
const shared = newClient();

// One stream: send() sends, next() waits for an answer, ended resolves to the status.
class Stream {
  constructor(client = shared, options = {}) {
    this.call = client.makeBidiStreamRequest(METHOD, encode, decode, new grpc.Metadata(), options);
    this.answers = [];
    this.waiting = [];
    this.call.on("data", (answer) => {
      const waiter = this.waiting.shift();
      if (waiter) waiter(answer);
      else this.answers.push(answer);
    });
    this.call.on("error", () => {}); // the status reports it
    this.ended = new Promise((resolve) => this.call.on("status", resolve));
  }

  send(message) {
    this.call.write(message);
  }

  async next() {
    if (this.answers.length) return this.answers.shift();
    const gone = this.ended.then((status) => {
      throw new Error(`the stream ended with ${status.code} ${status.details}`);
    });
    gone.catch(() => {});
    return Promise.race([new Promise((resolve) => this.waiting.push(resolve)), gone]);
  }

  async half() {
    this.call.end();
    const status = await this.ended;
    expect(status.code === grpc.status.OK, `status ${status.code} ${status.details}`);
    expect(this.answers.length === 0, `${this.answers.length} unexpected answers`);
  }
}

function expect(condition, text) {
  if (!condition) throw new Error(text);
}

function map(headers) {
  return { headers: Object.entries(headers).map(([key, value]) => ({ key, raw_value: Buffer.from(value) })) };
}

function requestHeaders(url = "/v1/completions", last = false, more = {}) {
  const headers = map({ ":method": last ? "GET" : "POST", ":path": url, "content-type": "application/json", ...more });
  return { request_headers: { headers, end_of_stream: last } };
}

function responseHeaders(type = "application/json") {
  return { response_headers: { headers: map({ ":status": "200", "content-type": type }), end_of_stream: false } };
}

const requestBody = (body, last = true) => ({ request_body: { body: Buffer.from(body), end_of_stream: last } });
const responseBody = (body, last = true) => ({ response_body: { body: Buffer.from(body), end_of_stream: last } });
const trailers = (direction) => ({ [`${direction}_trailers`]: {} });

function destination(answer) {
  expect(answer.request_headers, `no answer to request headers: ${JSON.stringify(answer)}`);
  const options = answer.request_headers.response.header_mutation.set_headers;
  const found = options.find((option) => option.header.key === DESTINATION);
  expect(found, "no destination among the headers");
  const target = Buffer.from(found.header.raw_value).toString();
  expect(/^127\.0\.\d+\.\d+:\d+$/.test(target), `destination ${target}`);
  return target;
}

// Collects all pieces of one direction, up to the one that ends it.
async function pieces(stream, direction) {
  const parts = [];
  for (;;) {
    const answer = await stream.next();
    const body = answer[`${direction}_body`];
    expect(body, `no body piece but ${JSON.stringify(answer).slice(0, 200)}`);
    const piece = body.response.body_mutation.streamed_response;
    expect(piece.body.length <= PIECE_BYTES_MAX, `a piece of ${piece.body.length} bytes`);
    parts.push(Buffer.from(piece.body));
    if (piece.end_of_stream) return Buffer.concat(parts);
  }
}

async function sendRequest(stream, body, url = "/v1/completions") {
  stream.send(requestHeaders(url));
  stream.send(requestBody(body));
  const target = destination(await stream.next());
  expect((await pieces(stream, "request")).equals(Buffer.from(body)), "the request's body came back changed");
  return target;
}

const completion = (prompt) => JSON.stringify({ model: "sim-model", prompt, max_tokens: 3 });
const usage = JSON.stringify({ usage: { prompt_tokens: 9, completion_tokens: 4 } });

async function finishResponse(stream) {
  stream.send(responseHeaders());
  expect((await stream.next()).response_headers, "no answer to response headers");
  stream.send(responseBody(usage));
  expect((await pieces(stream, "response")).equals(Buffer.from(usage)), "the answer's body came back changed");
  await stream.half();
}

const cases = {
  async "a short request and its answer"() {
    const stream = new Stream();
    await sendRequest(stream, completion("hello"));
    await finishResponse(stream);
  },
  async "a request without a body"() {
    const stream = new Stream();
    stream.send(requestHeaders("/v1/models", true));
    destination(await stream.next());
    await finishResponse(stream);
  },
  async "a streamed answer, chunk by chunk"() {
    const stream = new Stream();
    await sendRequest(stream, JSON.stringify({ model: "sim-model", messages: [{ role: "user", content: "hi" }], stream: true }), "/v1/chat/completions");
    stream.send(responseHeaders("text/event-stream"));
    expect((await stream.next()).response_headers, "no answer to response headers");
    for (let number = 0; number < 200; number++) {
      const chunk = `data: {"choices":[{"text":"${number}"}]}\n\n`;
      stream.send(responseBody(chunk, false));
      const piece = (await stream.next()).response_body.response.body_mutation.streamed_response;
      expect(Buffer.from(piece.body).toString() === chunk && !piece.end_of_stream, `chunk ${number} came back changed`);
    }
    stream.send(responseBody("data: [DONE]\n\n", false));
    await stream.next();
    stream.send(trailers("response"));
    expect((await stream.next()).response_trailers, "no answer to response trailers");
    await stream.half();
  },
  async "trailers end a request's body"() {
    const stream = new Stream();
    const body = completion("hello");
    stream.send(requestHeaders());
    stream.send(requestBody(body.slice(0, 9), false));
    stream.send(requestBody(body.slice(9), false));
    stream.send(trailers("request"));
    destination(await stream.next());
    const first = (await stream.next()).request_body.response.body_mutation.streamed_response;
    const second = (await stream.next()).request_body.response.body_mutation.streamed_response;
    expect(Buffer.concat([first.body, second.body]).toString() === body, "the body came back changed");
    expect((await stream.next()).request_trailers, "no answer to request trailers");
    await finishResponse(stream);
  },
  async "a body of 1 MB in one message"() {
    const stream = new Stream();
    await sendRequest(stream, completion("word ".repeat(200000)));
    await finishResponse(stream);
  },
  async "a body of 1 MB in pieces"() {
    const stream = new Stream();
    const body = completion("word ".repeat(200000));
    stream.send(requestHeaders());
    for (let at = 0; at < body.length; at += 50000) stream.send(requestBody(body.slice(at, at + 50000), at + 50000 >= body.length));
    destination(await stream.next());
    expect((await pieces(stream, "request")).toString() === body, "the body came back changed");
    await finishResponse(stream);
  },
  async "an answer of 1 MB"() {
    const stream = new Stream();
    await sendRequest(stream, completion("hello"));
    stream.send(responseHeaders());
    await stream.next();
    const answer = "a".repeat(1000000);
    stream.send(responseBody(answer));
    expect((await pieces(stream, "response")).toString() === answer, "the answer's body came back changed");
    await stream.half();
  },
  async "a body that is not JSON is refused"() {
    const stream = new Stream();
    stream.send(requestHeaders());
    stream.send(requestBody("{"));
    const { immediate_response: refusal } = await stream.next();
    expect(refusal && refusal.status.code === 400, "no refusal with 400");
    expect(JSON.parse(Buffer.from(refusal.body)).error.code === 400, "no error in the refusal's body");
    expect((await stream.ended).code === grpc.status.OK, "the stream of a refused request does not end with OK");
  },
  async "messages in an illegal order end the stream"() {
    const stream = new Stream();
    stream.send(responseBody("too early"));
    const status = await stream.ended;
    expect(status.code === grpc.status.INVALID_ARGUMENT, `status ${status.code} ${status.details}`);
    expect(/response_body in state await_headers/.test(status.details), `details '${status.details}' do not name the state`);
  },
  async "cancelled at every step, other streams continue"() {
    for (let step = 0; step < 5; step++) {
      const stream = new Stream();
      const beside = new Stream();
      const body = completion("hello");
      const messages = [requestHeaders(), requestBody(body), responseHeaders(), responseBody(usage, false)];
      for (const message of messages.slice(0, step)) stream.send(message);
      if (step > 1) await stream.next();
      stream.call.cancel();
      expect((await stream.ended).code === grpc.status.CANCELLED, "a cancelled stream does not end with CANCELLED");
      await sendRequest(beside, body);
      await finishResponse(beside);
    }
  },
  async "a deadline ends a stream"() {
    const stream = new Stream(shared, { deadline: Date.now() + 200 });
    stream.send(requestHeaders());
    const status = await stream.ended;
    expect(status.code === grpc.status.DEADLINE_EXCEEDED, `status ${status.code} ${status.details}`);
  },
  async "100 streams at a time on one connection"() {
    const one = async (number) => {
      const stream = new Stream();
      const target = await sendRequest(stream, completion(`prompt ${number} ${"x".repeat(number * 97)}`));
      await finishResponse(stream);
      return target;
    };
    const targets = new Set(await Promise.all(Array.from({ length: 100 }, (_, number) => one(number))));
    expect(targets.size > 1, "100 concurrent requests went to one server");
  },
  async "100 streams on 10 connections"() {
    const clients = Array.from({ length: 10 }, newClient);
    const one = async (number) => {
      const stream = new Stream(clients[number % clients.length]);
      await sendRequest(stream, completion(`other ${number}`));
      await finishResponse(stream);
    };
    await Promise.all(Array.from({ length: 100 }, (_, number) => one(number)));
    for (const client of clients) client.close();
  },
  async "an unknown method is unimplemented"() {
    const call = shared.makeBidiStreamRequest("/envoy.service.ext_proc.v3.ExternalProcessor/Other", encode, decode);
    call.on("error", () => {});
    call.on("data", () => {});
    const status = await new Promise((resolve) => call.on("status", resolve));
    expect(status.code === grpc.status.UNIMPLEMENTED, `status ${status.code} ${status.details}`);
  },
};

let failed = 0;
for (const [name, run] of Object.entries(cases)) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`not done within ${CASE_MS / 1000} s`)), CASE_MS);
  });
  try {
    await Promise.race([run(), late]);
    console.log(`ok ${name}`);
  } catch (problem) {
    failed += 1;
    console.log(`FAILED ${name}: ${problem.message}`);
  }
  clearTimeout(timer);
}
shared.close();
process.exit(failed ? 1 : 0);

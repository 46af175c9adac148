package main

import (
	"fmt"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

const completion = `{"model":"sim-model","prompt":"say hello to the picker","max_tokens":4}`

func headers(pairs ...string) *extproc.HttpHeaders {
	fields := &corev3.HeaderMap{}
	for i := 0; i < len(pairs); i += 2 {
		fields.Headers = append(fields.Headers, &corev3.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return &extproc.HttpHeaders{Headers: fields}
}

func requestHeaders() *extproc.ProcessingRequest {
	fields := headers(":method", "POST", ":path", "/v1/completions", "content-type", "application/json")
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: fields}}
}

func requestBody(body string, last bool) *extproc.ProcessingRequest {
	part := &extproc.HttpBody{Body: []byte(body), EndOfStream: last}
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: part}}
}

func responseHeaders() *extproc.ProcessingRequest {
	fields := headers(":status", "200", "content-type", "application/json")
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseHeaders{ResponseHeaders: fields}}
}

func responseBody(body string, last bool) *extproc.ProcessingRequest {
	part := &extproc.HttpBody{Body: []byte(body), EndOfStream: last}
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: part}}
}

// kind returns the name of an answer's kind.
func kind(answer *extproc.ProcessingResponse) string {
	switch answer.Response.(type) {
	case *extproc.ProcessingResponse_RequestHeaders:
		return "request headers"
	case *extproc.ProcessingResponse_RequestBody:
		return "request body"
	case *extproc.ProcessingResponse_ResponseHeaders:
		return "response headers"
	case *extproc.ProcessingResponse_ResponseBody:
		return "response body"
	case *extproc.ProcessingResponse_ImmediateResponse:
		return fmt.Sprintf("error %v", answer.GetImmediateResponse().GetStatus().GetCode())
	}
	return "an unknown answer"
}

// destination returns the picked endpoint.
func destination(answer *extproc.ProcessingResponse) string {
	for _, set := range answer.GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders() {
		if set.GetHeader().GetKey() == "x-gateway-destination-endpoint" {
			return string(set.GetHeader().GetRawValue())
		}
	}
	return ""
}

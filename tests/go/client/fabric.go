package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

const (
	fabricRequests = 400
	fabricAtOnce   = 8
	chat           = `{"model":"sim-model","messages":[{"role":"user","content":"hello"}]}`
)

// fabric asks like NGINX Gateway Fabric (cmd/gateway/endpoint_picker.go of its repository): a connection for each request, header
// fields without a path and in Value, the whole body, CloseSend; then it reads the target, and on to the end.
func fabric() error {
	var group sync.WaitGroup
	failures := make(chan error, fabricRequests)
	for range fabricAtOnce {
		group.Go(func() {
			for range fabricRequests / fabricAtOnce {
				if err := fabricRequest(); err != nil {
					failures <- err
				}
			}
		})
	}
	group.Wait()
	if len(failures) > 0 {
		return fmt.Errorf("%d of %d requests failed, one of them: %w", len(failures), fabricRequests, <-failures)
	}
	return nil
}

func fabricRequest() error {
	connection, err := dial()
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	stream, err := extproc.NewExternalProcessorClient(connection).Process(ctx)
	if err != nil {
		return err
	}
	fields := &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
		{Key: "content-type", Value: "application/json"},
		{Key: "x-epp-host", Value: "picker"},
		{Key: "x-epp-port", Value: "9002"},
	}}
	head := &extproc.HttpHeaders{Headers: fields}
	stream.Send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: head}})
	stream.Send(requestBody(chat, true))
	if err := stream.CloseSend(); err != nil {
		return err
	}
	target := ""
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if refused := answer.GetImmediateResponse(); refused != nil {
			return fmt.Errorf("%v: %s", refused.GetStatus().GetCode(), refused.GetBody())
		}
		target += destination(answer)
	}
	if !strings.Contains(target, ":") {
		return fmt.Errorf("no endpoint was picked")
	}
	return nil
}

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"
)

var grpcChecks = []check{
	{"grpc-go: 200 streams, 50 at a time, over one connection", many},
	{"grpc-go: a large body in pieces comes back unchanged", largeBody},
	{"grpc-go: messages compressed with gzip", compressed},
	{"grpc-go: cancelled streams do not harm the connection", cancelled},
	{"grpc-go: a deadline ends a waiting stream", deadline},
	{"grpc-go: an unknown method is UNIMPLEMENTED", unknownMethod},
	{"grpc-go: a message above the limit is RESOURCE_EXHAUSTED", tooLarge},
	{"grpc-go: NGINX Gateway Fabric, a connection for each of 400 requests", fabric},
}

func dial() (*grpc.ClientConn, error) {
	creds := insecure.NewCredentials()
	if *useTLS {
		creds = credentials.NewTLS(tlsConfig())
	}
	return grpc.NewClient(*addr, grpc.WithTransportCredentials(creds))
}

// expect reads one answer of the wanted kind.
func expect(stream extproc.ExternalProcessor_ProcessClient, want string) (*extproc.ProcessingResponse, error) {
	answer, err := stream.Recv()
	if err != nil {
		return nil, fmt.Errorf("waiting for %s: %w", want, err)
	}
	if got := kind(answer); got != want {
		return nil, fmt.Errorf("%s instead of %s", got, want)
	}
	return answer, nil
}

func requestPhase(stream extproc.ExternalProcessor_ProcessClient, body string) error {
	stream.Send(requestHeaders())
	stream.Send(requestBody(body, true))
	answer, err := expect(stream, "request headers")
	if err != nil {
		return err
	}
	if !strings.Contains(destination(answer), ":") {
		return fmt.Errorf("no endpoint was picked")
	}
	_, err = expect(stream, "request body")
	return err
}

func responsePhase(stream extproc.ExternalProcessor_ProcessClient) error {
	stream.Send(responseHeaders())
	if _, err := expect(stream, "response headers"); err != nil {
		return err
	}
	stream.Send(responseBody(`{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4}}`, true))
	if _, err := expect(stream, "response body"); err != nil {
		return err
	}
	stream.CloseSend()
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("end of stream: %v", err)
	}
	return nil
}

func exchange(connection *grpc.ClientConn, options ...grpc.CallOption) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	stream, err := extproc.NewExternalProcessorClient(connection).Process(ctx, options...)
	if err != nil {
		return err
	}
	if err := requestPhase(stream, completion); err != nil {
		return err
	}
	return responsePhase(stream)
}

func many() error {
	connection, err := dial()
	if err != nil {
		return err
	}
	defer connection.Close()
	var group sync.WaitGroup
	failures := make(chan error, 200)
	for range 50 {
		group.Go(func() {
			for range 4 {
				if err := exchange(connection); err != nil {
					failures <- err
				}
			}
		})
	}
	group.Wait()
	if len(failures) > 0 {
		return fmt.Errorf("%d streams failed, one of them: %w", len(failures), <-failures)
	}
	return nil
}

func largeBody() error {
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
	body := `{"model":"sim-model","prompt":"` + strings.Repeat("a long story ", 200_000) + `"}`
	stream.Send(requestHeaders())
	for at := 0; at < len(body); at += 100_000 {
		end := min(at+100_000, len(body))
		stream.Send(requestBody(body[at:end], end == len(body)))
	}
	if _, err := expect(stream, "request headers"); err != nil {
		return err
	}
	var received strings.Builder
	for last := false; !last; {
		answer, err := expect(stream, "request body")
		if err != nil {
			return err
		}
		part := answer.GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse()
		received.Write(part.GetBody())
		last = part.GetEndOfStream()
	}
	if received.String() != body {
		return fmt.Errorf("got %d bytes back for %d, or different ones", received.Len(), len(body))
	}
	return responsePhase(stream)
}

func compressed() error {
	connection, err := dial()
	if err != nil {
		return err
	}
	defer connection.Close()
	return exchange(connection, grpc.UseCompressor(gzip.Name))
}

func cancelled() error {
	connection, err := dial()
	if err != nil {
		return err
	}
	defer connection.Close()
	for range 100 {
		ctx, cancel := context.WithCancel(context.Background())
		stream, err := extproc.NewExternalProcessorClient(connection).Process(ctx)
		if err != nil {
			cancel()
			return err
		}
		stream.Send(requestHeaders())
		stream.Send(requestBody(completion[:10], false))
		cancel()
	}
	return exchange(connection)
}

func deadline() error {
	connection, err := dial()
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	stream, err := extproc.NewExternalProcessorClient(connection).Process(ctx)
	if err != nil {
		return err
	}
	stream.Send(requestHeaders())
	if _, err := stream.Recv(); status.Code(err) != codes.DeadlineExceeded {
		return fmt.Errorf("ended with %v", err)
	}
	return exchange(connection)
}

func unknownMethod() error {
	connection, err := dial()
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err = connection.Invoke(ctx, "/no.such/Method", requestHeaders(), &extproc.ProcessingResponse{})
	if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "/no.such/Method") {
		return fmt.Errorf("ended with %v", err)
	}
	return nil
}

func tooLarge() error {
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
	stream.Send(requestHeaders())
	stream.Send(requestBody(strings.Repeat("x", 64<<20), true))
	if _, err := stream.Recv(); status.Code(err) != codes.ResourceExhausted {
		return fmt.Errorf("ended with %v", err)
	}
	return exchange(connection)
}

func drainCheck() error {
	connection, err := dial()
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	stream, err := extproc.NewExternalProcessorClient(connection).Process(ctx)
	if err != nil {
		return err
	}
	if err := requestPhase(stream, completion); err != nil {
		return err
	}
	fmt.Println("open")
	bufio.NewReader(os.Stdin).ReadString('\n')
	return responsePhase(stream)
}

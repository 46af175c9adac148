// client tests an endpoint picker's ext_proc port: ordinary streams of grpc-go, and the negative cases that no gRPC library sends
// (GOAWAY, RST_STREAM at every point of a stream, PING between all frames, one stream too many). It prints one line per case, "ok" or
// "FAILED", and exits with the number of failed cases.
//
//	client -addr 127.0.0.1:9002 [-tls] [-drain]
//
// With -drain it holds one stream open, prints "open", waits for a line on its standard input while the picker gets SIGTERM, and expects
// that the stream ends normally.
package main

import (
	"crypto/tls"
	"flag"
	"fmt"
	"os"
	"time"
)

var (
	addr   = flag.String("addr", "127.0.0.1:9002", "the picker's ext_proc address")
	useTLS = flag.Bool("tls", false, "use TLS; the certificate is not verified")
	drain  = flag.Bool("drain", false, "only hold one stream through a graceful shutdown")
)

const patience = 10 * time.Second

type check struct {
	name string
	run  func() error
}

func tlsConfig() *tls.Config {
	return &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}
}

func main() {
	flag.Parse()
	checks := append(rawChecks, grpcChecks...)
	if *drain {
		checks = []check{{"a stream that is open when the picker stops", drainCheck}}
	}
	failed := 0
	for _, c := range checks {
		if err := c.run(); err != nil {
			failed++
			fmt.Printf("FAILED %s: %v\n", c.name, err)
		} else {
			fmt.Printf("ok     %s\n", c.name)
		}
	}
	os.Exit(failed)
}

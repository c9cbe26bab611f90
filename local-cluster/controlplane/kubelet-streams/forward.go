package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
)

// host is the address of a pod. It implements portforward.PortForwarder.
type host string

func (h host) PortForward(ctx context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	var dialer net.Dialer
	connection, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(string(h), strconv.Itoa(int(port))))
	if err != nil {
		return fmt.Errorf("nothing in the pod answers on port %d of %s: %w", port, h, err)
	}
	defer connection.Close()
	go func() {
		io.Copy(connection, stream)
		connection.(*net.TCPConn).CloseWrite()
	}()
	_, err = io.Copy(stream, connection)
	return err
}

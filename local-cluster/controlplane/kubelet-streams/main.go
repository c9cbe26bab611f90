// Command kubelet-streams serves one streaming request to a local node: kubectl exec, attach or port-forward.
//
// As with inetd, standard input is the connection. It starts with the HTTP request, which the node has read and
// admitted. Kubernetes' own library speaks the protocols: SPDY, and the older ones over WebSockets. The API server
// translates the newer ones.
//
//	kubelet-streams exec -- COMMAND [ARG...]   run a command of this machine in this program's environment
//	kubelet-streams attach SOCKET              join the container whose shim listens on this Unix socket
//	kubelet-streams forward HOST               connect to ports of this host
//
// It ends with the request. Then the shim under which it runs ends what a command has left.
package main

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

const (
	// As in a kubelet.
	idleTimeout     = 4 * time.Hour
	creationTimeout = remotecommand.DefaultStreamCreationTimeout
)

func main() {
	handler, err := newHandler(os.Args[1:])
	if err == nil {
		err = serveConnection(os.Stdin, handler)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func newHandler(args []string) (http.HandlerFunc, error) {
	switch {
	case len(args) > 2 && args[0] == "exec" && args[1] == "--":
		return execHandler(command(args[2:])), nil
	case len(args) == 2 && args[0] == "attach":
		return attachHandler(shimSocket(args[1])), nil
	case len(args) == 2 && args[0] == "forward":
		return forwardHandler(host(args[1])), nil
	}
	return nil, errors.New("usage: kubelet-streams exec -- COMMAND [ARG...] | attach SOCKET | forward HOST")
}

func execHandler(executor remotecommand.Executor) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		options, err := remotecommand.NewOptions(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		remotecommand.ServeExec(w, r, executor, "", "", "", nil, options, idleTimeout, creationTimeout,
			remotecommand.SupportedStreamingProtocols)
	}
}

func attachHandler(attacher remotecommand.Attacher) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		options, err := remotecommand.NewOptions(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		remotecommand.ServeAttach(w, r, attacher, "", "", "", options, idleTimeout, creationTimeout,
			remotecommand.SupportedStreamingProtocols)
	}
}

func forwardHandler(forwarder portforward.PortForwarder) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		options, err := portforward.NewV4Options(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		portforward.ServePortForward(w, r, forwarder, "", "", options, idleTimeout, creationTimeout,
			portforward.SupportedProtocols)
	}
}

// serveConnection serves one request on a connection.
func serveConnection(file *os.File, handler http.HandlerFunc) error {
	connection, err := net.FileConn(file)
	if err != nil {
		return fmt.Errorf("standard input is not a connection: %w", err)
	}
	file.Close()
	listener := &oneConnection{connections: make(chan net.Conn, 1), address: connection.LocalAddr()}
	listener.connections <- connection
	end := sync.OnceFunc(func() { close(listener.connections) })
	var upgraded atomic.Bool
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			handler(w, r)
			if upgraded.Load() {
				end()
			}
		}),
		ConnState: func(_ net.Conn, state http.ConnState) {
			switch state {
			case http.StateHijacked:
				upgraded.Store(true)
			case http.StateClosed:
				end()
			}
		},
	}
	server.SetKeepAlivesEnabled(false)
	if err := server.Serve(listener); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// oneConnection is a listener that has one connection, and is closed when the channel is.
type oneConnection struct {
	connections chan net.Conn
	address     net.Addr
}

func (l *oneConnection) Accept() (net.Conn, error) {
	connection, open := <-l.connections
	if !open {
		return nil, net.ErrClosed
	}
	return connection, nil
}

func (l *oneConnection) Close() error   { return nil }
func (l *oneConnection) Addr() net.Addr { return l.address }

// One end of a migration proxy in Go, built the way KubeVirt's is
// (pkg/virt-handler/migration-proxy in its repository): a goroutine for each direction of a
// connection, io.Copy, and crypto/tls with certificates on both sides between the two ends.
// `cargo xtask bench tunnel` starts a source and a destination.
//
// Unlike KubeVirt's, it passes the end of a stream on and keeps the other direction open, which the
// benchmark needs.
package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"
)

type stream interface {
	net.Conn
	CloseWrite() error
}

func main() {
	log.SetFlags(0)
	identity := flag.String("identity", "", "folder with cert.pem, key.pem and ca-cert.pem")
	peer := flag.String("peer", "", "name in the destination's certificate; makes this end the source")
	flag.Parse()
	routes := flag.Args()
	if len(routes) == 0 || len(routes)%2 != 0 {
		log.Fatal("usage: proxy -identity FOLDER [-peer NAME] LISTEN TARGET [LISTEN TARGET]…")
	}
	config, err := load(*identity)
	if err != nil {
		log.Fatal(err)
	}
	config.ServerName = *peer
	isSource := *peer != ""
	for ; len(routes) > 0; routes = routes[2:] {
		listener, err := listen(routes[0], config, isSource)
		if err != nil {
			log.Fatal(err)
		}
		go serve(listener, routes[1], config, isSource)
	}
	fmt.Println("listening")
	select {}
}

// load returns the settings of both roles: TLS 1.3, and each side verifies the other's certificate.
func load(identity string) (*tls.Config, error) {
	file := func(name string) string { return filepath.Join(identity, name) }
	certificate, err := tls.LoadX509KeyPair(file("cert.pem"), file("key.pem"))
	if err != nil {
		return nil, err
	}
	pem, err := os.ReadFile(file("ca-cert.pem"))
	if err != nil {
		return nil, err
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(pem) {
		return nil, errors.New("ca-cert.pem has no certificate")
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{certificate},
		RootCAs:      authorities,
		ClientCAs:    authorities,
		ClientAuth:   tls.RequireAndVerifyClientCert,
	}, nil
}

// listen opens "unix:PATH" or "tcp:ADDRESS:PORT": plain at the source, TLS at the destination.
func listen(place string, config *tls.Config, isSource bool) (net.Listener, error) {
	network, address, _ := strings.Cut(place, ":")
	if isSource {
		return net.Listen(network, address)
	}
	return tls.Listen(network, address, config)
}

// dial connects to an address of the same form: with TLS at the source, plain at the destination.
func dial(place string, config *tls.Config, isSource bool) (net.Conn, error) {
	network, address, _ := strings.Cut(place, ":")
	if isSource {
		return tls.Dial(network, address, config)
	}
	return net.Dial(network, address)
}

func serve(listener net.Listener, target string, config *tls.Config, isSource bool) {
	for {
		near, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go func() {
			defer near.Close()
			far, err := dial(target, config, isSource)
			if err != nil {
				log.Print(err)
				return
			}
			defer far.Close()
			carry(near.(stream), far.(stream))
		}()
	}
}

// carry moves bytes in both directions until both have ended, or one has failed.
func carry(near, far stream) {
	ended := make(chan error, 2)
	go func() { ended <- move(far, near) }()
	go func() { ended <- move(near, far) }()
	if <-ended == nil {
		<-ended
	}
}

func move(to, from stream) error {
	if _, err := io.Copy(to, from); err != nil {
		return err
	}
	return to.CloseWrite()
}

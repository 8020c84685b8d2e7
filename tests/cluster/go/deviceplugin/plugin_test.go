package main

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const patience = 10 * time.Second

// kubelet is the registering half of a kubelet: it says who registered.
type kubelet struct {
	api.UnimplementedRegistrationServer
	requests chan *api.RegisterRequest
}

func (k *kubelet) Register(_ context.Context, request *api.RegisterRequest) (*api.Empty, error) {
	k.requests <- request
	return &api.Empty{}, nil
}

// start listens as a starting kubelet does: everything in the folder is removed first.
func (k *kubelet) start(t *testing.T, folder string) (stop func()) {
	t.Helper()
	old, err := filepath.Glob(filepath.Join(folder, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range old {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	listener, err := net.Listen("unix", filepath.Join(folder, kubeletSocket))
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterRegistrationServer(server, k)
	go func() { _ = server.Serve(listener) }()
	return server.Stop
}

func (k *kubelet) registration(t *testing.T) *api.RegisterRequest {
	t.Helper()
	select {
	case request := <-k.requests:
		return request
	case <-time.After(patience):
		t.Fatal("the plugin did not register")
		return nil
	}
}

// node runs the plugin with four cards beside a kubelet.
type node struct {
	kubelet *kubelet
	folder  string
	health  string
	stop    func()
}

func startNode(t *testing.T) *node {
	t.Helper()
	folder, err := os.MkdirTemp("", "dp") // short: a socket's path ends at 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	n := &node{
		kubelet: &kubelet{requests: make(chan *api.RegisterRequest, 4)},
		folder:  folder,
		health:  filepath.Join(t.TempDir(), "unhealthy"),
	}
	n.stop = n.kubelet.start(t, folder)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, newPlugin(newCards(4), "habana.ai/gaudi", folder), n.health) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		n.stop()
		_ = os.RemoveAll(folder)
	})
	return n
}

func (n *node) dial(t *testing.T, endpoint string) api.DevicePluginClient {
	t.Helper()
	connection, err := grpc.NewClient(
		"unix://"+filepath.Join(n.folder, endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return api.NewDevicePluginClient(connection)
}

func unhealthyIn(t *testing.T, stream grpc.ServerStreamingClient[api.ListAndWatchResponse]) []string {
	t.Helper()
	answer, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if len(answer.Devices) != 4 {
		t.Fatalf("got %d cards, want 4", len(answer.Devices))
	}
	ids := []string{}
	for _, device := range answer.Devices {
		if device.Health == api.Unhealthy {
			ids = append(ids, device.ID)
		}
	}
	return ids
}

func TestItRegistersItsResource(t *testing.T) {
	n := startNode(t)
	request := n.kubelet.registration(t)
	if request.ResourceName != "habana.ai/gaudi" || request.Version != "v1beta1" {
		t.Fatalf("registered %v", request)
	}
}

func TestItRegistersAgainWhenTheKubeletRestarts(t *testing.T) {
	n := startNode(t)
	n.kubelet.registration(t)
	n.stop()
	n.stop = n.kubelet.start(t, n.folder)
	endpoint := n.kubelet.registration(t).Endpoint
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := n.dial(t, endpoint).GetDevicePluginOptions(ctx, &api.Empty{}); err != nil {
		t.Fatalf("the plugin registered a socket that does not answer: %v", err)
	}
}

func TestACardIsReportedUnhealthyAndHealthyAgain(t *testing.T) {
	n := startNode(t)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	stream, err := n.dial(t, n.kubelet.registration(t).Endpoint).ListAndWatch(ctx, &api.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	if ids := unhealthyIn(t, stream); len(ids) != 0 {
		t.Fatalf("unhealthy at first: %v", ids)
	}
	if err := os.WriteFile(n.health, []byte("gaudi-2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	waitFor(t, stream, "gaudi-2")
	if err := os.Remove(n.health); err != nil {
		t.Fatal(err)
	}
	waitFor(t, stream, "")
}

// waitFor reads reports until exactly the card `id` is unhealthy, or none when it is empty; the file's creation and its
// content are two events.
func waitFor(t *testing.T, stream grpc.ServerStreamingClient[api.ListAndWatchResponse], id string) {
	t.Helper()
	for range 4 {
		ids := unhealthyIn(t, stream)
		if (id == "" && len(ids) == 0) || (len(ids) == 1 && ids[0] == id) {
			return
		}
	}
	t.Fatalf("no report in which just %q is unhealthy", id)
}

func TestAContainerGetsTheNamesOfItsCards(t *testing.T) {
	n := startNode(t)
	client := n.dial(t, n.kubelet.registration(t).Endpoint)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	answer, err := client.Allocate(ctx, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{
		{DevicesIds: []string{"gaudi-3", "gaudi-1"}},
		{DevicesIds: []string{"gaudi-0", "gaudi-1", "gaudi-2", "gaudi-3"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	part, whole := answer.ContainerResponses[0].Envs, answer.ContainerResponses[1].Envs
	for name, want := range map[string]string{
		"HABANA_VISIBLE_DEVICES":  "1,3",
		"HABANA_VISIBLE_MODULES":  "2,0",
		"HL_VISIBLE_DEVICES":      "/dev/accel/accel1,/dev/accel/accel3",
		"HL_VISIBLE_DEVICES_UUID": "gaudi-1,gaudi-3",
	} {
		if part[name] != want {
			t.Errorf("%s is %q, want %q", name, part[name], want)
		}
	}
	if modules, told := whole["HABANA_VISIBLE_MODULES"]; told {
		t.Errorf("a container with the whole node was told modules %q", modules)
	}
}

func TestACardThatIsNotThereIsRefused(t *testing.T) {
	n := startNode(t)
	client := n.dial(t, n.kubelet.registration(t).Endpoint)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := client.Allocate(ctx, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{
		{DevicesIds: []string{"gaudi-9"}},
	}})
	if status.Code(err) != codes.InvalidArgument {
		t.Fatalf("got %v", err)
	}
}

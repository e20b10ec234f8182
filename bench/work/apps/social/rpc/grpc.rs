//! Calls as unary calls of gRPC by tonic, on one HTTP/2 connection to each process, with postcard instead of protocol buffers.
//!
//! Services may wait for others, so each call has a thread of tokio's for blocking work. What other programs would generate from
//! a description of the service is written by hand.

use super::{Peer, Process, ServiceAnswer, ServiceCall};
use anyhow::{Context as _, Result, anyhow};
use prost::bytes::{Buf, BufMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::convert::Infallible;
use std::marker::PhantomData;
use std::net::TcpListener;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use tokio::runtime::{Builder, Runtime};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

const PATH: &str = "/farfield.Social/Call";
/// Ten posts with the largest media, and more.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Returns the runtime of all calls from and to this process.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Builder::new_multi_thread().enable_all().build().expect("the machine has room for threads"))
}

/// Messages as postcard.
struct PostcardCodec<E, D>(PhantomData<(E, D)>);

impl<E, D> Default for PostcardCodec<E, D> {
    fn default() -> Self {
        PostcardCodec(PhantomData)
    }
}

impl<E: Serialize + Send + 'static, D: DeserializeOwned + Send + 'static> Codec for PostcardCodec<E, D> {
    type Encode = E;
    type Decode = D;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self::default()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<E: Serialize, D> Encoder for PostcardCodec<E, D> {
    type Item = E;
    type Error = Status;

    fn encode(&mut self, message: E, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let bytes = postcard::to_allocvec(&message).map_err(|error| Status::internal(error.to_string()))?;
        buffer.put_slice(&bytes);
        Ok(())
    }
}

impl<E, D: DeserializeOwned> Decoder for PostcardCodec<E, D> {
    type Item = D;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<D>, Status> {
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        postcard::from_bytes(&bytes).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// The service, and its one method.
#[derive(Clone)]
struct Social(Arc<Process>);

impl tonic::server::UnaryService<ServiceCall> for Social {
    type Response = ServiceAnswer;
    type Future = BoxFuture<Response<ServiceAnswer>, Status>;

    fn call(&mut self, request: Request<ServiceCall>) -> Self::Future {
        let process = self.0.clone();
        Box::pin(async move {
            let answer = tokio::task::spawn_blocking(move || process.answer(request.into_inner())).await;
            answer.map(Response::new).map_err(|error| Status::internal(error.to_string()))
        })
    }
}

type Body = tonic::body::Body;

impl Service<http::Request<Body>> for Social {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let social = self.clone();
        Box::pin(async move {
            if request.uri().path() != PATH {
                return Ok(Status::unimplemented("no such method").into_http());
            }
            let codec = PostcardCodec::<ServiceAnswer, ServiceCall>::default();
            let mut server = tonic::server::Grpc::new(codec).max_decoding_message_size(MESSAGE_BYTES_MAX);
            Ok(server.unary(social, request).await)
        })
    }
}

/// Answers calls for ever.
pub(super) fn listen(process: Arc<Process>) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no port")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?.to_string();
    runtime().spawn(async move {
        let incoming = TcpIncoming::from(tokio::net::TcpListener::from_std(listener)?).with_nodelay(Some(true));
        Ok::<_, anyhow::Error>(Server::builder().serve_with_incoming(Social(process), incoming).await?)
    });
    Ok(address)
}

pub(super) struct GrpcPeer(Channel);

impl GrpcPeer {
    pub(super) fn connect(address: &str) -> Result<GrpcPeer> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?.tcp_nodelay(true);
        let channel = runtime().block_on(endpoint.connect()).with_context(|| format!("no service at {address}"))?;
        Ok(GrpcPeer(channel))
    }
}

impl Peer for GrpcPeer {
    fn call(&self, call: ServiceCall) -> Result<ServiceAnswer> {
        let mut client = tonic::client::Grpc::new(self.0.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        runtime().block_on(async {
            client.ready().await?;
            let codec = PostcardCodec::<ServiceCall, ServiceAnswer>::default();
            let answer = client.unary(Request::new(call), PathAndQuery::from_static(PATH), codec).await;
            Ok(answer.map_err(|status| anyhow!("gRPC says {status}"))?.into_inner())
        })
    }
}

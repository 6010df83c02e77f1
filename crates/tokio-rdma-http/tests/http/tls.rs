//! TLS by rustls between a stream and its user.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::rustls::pki_types::{PrivatePkcs8KeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::{pattern, run, soon};

fn configs() -> (TlsAcceptor, TlsConnector) {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let certificate = certified.cert.der().clone();
    let key = PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der());
    let server = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key.into())
        .unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate).unwrap();
    let client = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    (Arc::new(server).into(), Arc::new(client).into())
}

#[test]
fn encrypted_bytes_arrive_and_the_end_is_authenticated() {
    run(async |devices| {
        let (acceptor, connector) = configs();
        let listener = devices.listen().await.into_inner();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move {
            let (stream, _) = listener.accept().await?;
            let mut stream = acceptor.accept(stream).await?;
            let mut request = Vec::new();
            stream.read_to_end(&mut request).await?;
            stream.write_all(&request).await?;
            stream.shutdown().await
        });
        let stream = devices.connect(address).await;
        let name = ServerName::try_from("localhost").unwrap();
        let mut stream = soon("handshake", connector.connect(name, stream)).await.unwrap();
        let request = pattern(300_000, 9);
        stream.write_all(&request).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        soon("answer", stream.read_to_end(&mut answer)).await.unwrap();
        assert!(answer == request);
        soon("server", serving).await.unwrap().unwrap();
    });
}

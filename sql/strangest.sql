-- Which labels the model reconstructs worst: rows unlike the rest stand out.
SELECT label, count(*) AS rows, avg(reconstruction_error) AS mean_error
FROM connection_embeddings
GROUP BY label
HAVING count(*) >= 10
ORDER BY mean_error DESC
